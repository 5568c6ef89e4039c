-- Grants free exclusive locks to several requests, each on its own. A request that does not find
-- its lock free and without waiters is left to acquire.lua, as if it had not been sent, unless the
-- lock is done and has no waiters.
-- KEYS: the locks, then the fences, then the queues of the requests; on a server of a quorum also
-- the marker of its data. ARGV: for each request its deadline (server time, microseconds), member,
-- lease (ms), the number of fencing tokens to reserve, and the number proposed as the fencing token
-- (0: none); on a server of a quorum also the expected marker.
-- Returns {server time, for each request its fence, the value of a lock that is done, or false}
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local replies = {micros}
if #KEYS % 3 == 1 and redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV] then
  return replies
end
local count = math.floor(#KEYS / 3)
-- One command reads all of a kind. A lock that appears twice is free only once, so a counter that
-- was read is not written before it is used, and no request of a group enters a queue.
local counters = redis.pcall('MGET', unpack(KEYS, count + 1, 2 * count))
local queues = redis.pcall('EXISTS', unpack(KEYS, 2 * count + 1, 3 * count))
if counters.err or type(queues) == 'table' then
  return replies
end
-- The commands of one request must not fail the others.
local function answer(i)
  local lock, fence, argument = KEYS[i], KEYS[count + i], 5 * i - 4
  local proposal = tonumber(ARGV[argument + 4])
  local base = proposal > 0 and math.min(proposal, micros + 60000000) or micros
  -- MGET returns nothing for a key of another type. See acquire_free.lua.
  local text, last = counters[i]
  if text then
    last = string.match(text, '^%d+$') and tonumber(text)
  else
    last = redis.pcall('EXISTS', fence) == 0 and 0
  end
  if not last or last >= 9007199254740991 then
    return false
  end
  local set = redis.pcall('SET', lock, ARGV[argument + 1], 'PX', ARGV[argument + 2], 'NX')
  if not set then
    local holder = redis.pcall('GET', lock)
    return is_done(holder) and holder
  elseif set.err then
    return false
  end
  local number, reserved = math.max(last + 1, base), tonumber(ARGV[argument + 3])
  local counted = redis.pcall('SET', fence, string.format('%.0f', number + reserved), 'EX', 86400)
  if counted.ok then
    return number
  end
  redis.pcall('DEL', lock)
  return false
end

for i = 1, count do
  local is_late, queue = micros > tonumber(ARGV[5 * i - 4]), KEYS[2 * count + i]
  local has_waiters = queues > 0 and redis.pcall('EXISTS', queue) ~= 0
  replies[i + 1] = not is_late and not has_waiters and answer(i)
end
return replies
