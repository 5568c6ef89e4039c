-- The latest fencing token of a lock, 0 if there is none, nil if somebody's data lie in its place.
local function counter(fence)
  -- Where something else than a string lies, GET says so and touches nothing.
  local text = redis.pcall('GET', fence)
  if not text then
    return 0
  end
  if type(text) == 'table' then
    if string.find(text.err, 'WRONGTYPE', 1, true) then
      return nil
    end
    error(text)
  end
  local number = string.match(text, '^%d+$') and tonumber(text)
  -- Above 2^53 a Lua number is no longer exact.
  return number and number < 9007199254740991 and number or nil
end

-- Where the tokens of this script's grants begin: at the server's time, unless the request proposes a number.
local base = micros

-- The token of a new grant, and so many behind it that are its own as well. The clock keeps it increasing where the
-- counter was lost (expired, evicted, or a replica was promoted that lagged behind), the counter keeps it increasing
-- where the clock went back.
local function draw(fence, last, spare)
  local number = math.max(last + 1, base)
  redis.call('SET', fence, whole(number + spare), 'EX', 86400)
  return number
end

-- The token of a grant that was given before. A writer's is the counter, as nobody can have been granted since: its own
-- token or the last of those that are reserved for it. A reader's is not: another reader may have been granted the
-- counter's value, so this one takes a larger.
local function confirm(fence, last, mode)
  if mode == 'exclusive' and last > 0 then
    return last
  end
  return draw(fence, last, 0)
end
