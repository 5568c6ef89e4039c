-- The latest fencing token of a lock; 0 if there is none, nil if the key holds foreign data.
local function counter(fence)
  -- On a key of another type GET fails and changes nothing.
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

-- The lower bound of the fencing tokens that this script grants: the server's time, unless the
-- request proposes a number.
local base = micros

-- Draws the token of a new grant, and reserves the next `reserved` tokens for it. The clock keeps
-- the tokens increasing if the counter was lost (it expired, was evicted, or a lagging replica was
-- promoted). The counter keeps them increasing if the clock went back.
local function draw(fence, last, reserved)
  local number = math.max(last + 1, base)
  redis.call('SET', fence, whole(number + reserved), 'EX', 86400)
  return number
end

-- The token of an earlier grant. For a writer it is the counter, as there can have been no other
-- grant since: its own token, or the last of its reserved tokens. For a reader it is not: another
-- reader may have been granted the counter's value, so a larger token is drawn.
local function confirm(fence, last, mode)
  if mode == 'exclusive' and last > 0 then
    return last
  end
  return draw(fence, last, 0)
end
