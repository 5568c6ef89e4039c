-- Grants free exclusive locks to several requests, each on its own. A request that does not find
-- its lock free and without waiters is left to acquire.lua, as if it had not been sent.
-- KEYS: the lock, fence and queue of each request; on a server of a quorum also the marker of its
-- data. ARGV: for each request its deadline (server time, microseconds), member, lease (ms), the
-- number of fencing tokens to reserve, and the number proposed as the fencing token (0: none); on a
-- server of a quorum also the expected marker.
-- Returns {server time, fence or false, ...}
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local replies = {micros}
if #KEYS % 3 == 1 and redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV] then
  return replies
end
-- The commands of one request must not fail the others.
for i = 1, math.floor(#KEYS / 3) do
  local lock, fence, argument = KEYS[3 * i - 2], KEYS[3 * i - 1], 5 * i - 4
  local proposal = tonumber(ARGV[argument + 4])
  local base = proposal > 0 and math.min(proposal, micros + 60000000) or micros
  -- See acquire_free.lua.
  local text = redis.pcall('GET', fence)
  local last = not text and 0 or type(text) == 'string' and string.match(text, '^%d+$') and tonumber(text)
  local reply = false
  if micros <= tonumber(ARGV[argument]) and last and last < 9007199254740991 and
      not redis.pcall('HGET', KEYS[3 * i], 'ends') then
    local set = redis.pcall('SET', lock, ARGV[argument + 1], 'PX', ARGV[argument + 2], 'NX')
    if set and set.ok then
      local number, reserved = math.max(last + 1, base), tonumber(ARGV[argument + 3])
      local counted = redis.pcall('SET', fence, string.format('%.0f', number + reserved), 'EX', 86400)
      reply = counted.ok and number
      if not reply then
        redis.pcall('DEL', lock)
      end
    end
  end
  replies[i + 1] = reply or false
end
return replies
