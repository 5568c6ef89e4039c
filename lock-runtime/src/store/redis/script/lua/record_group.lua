-- Records the results of several writers and releases their locks, each on its own. One that finds
-- waiters, a reservation or a server that is out of memory is left to release.lua, as if it had not
-- been sent.
-- KEYS: the locks, then the queues. ARGV: for each its member, the time for which the result is
-- kept (ms), its fencing token, and the result.
-- Returns {1 if the lock is done, 0 if the member did not hold it, or false, ...}
local count = #KEYS / 2
local holders = redis.pcall('MGET', unpack(KEYS, 1, count))
local queues = redis.pcall('EXISTS', unpack(KEYS, count + 1))
if holders.err or type(queues) == 'table' then
  return {}
end
local replies, time = {}, timestamp()
for i = 1, count do
  local holder, member, argument, reply = holders[i], ARGV[4 * i - 3], 4 * i, false
  if queues == 0 or redis.pcall('EXISTS', KEYS[count + i]) == 0 then
    if holder == member then
      local value = done(member, time, ARGV[argument - 1], ARGV[argument])
      reply = redis.pcall('SET', KEYS[i], value, 'PX', ARGV[argument - 2]).ok and 1
    elseif is_done_by(holder, member) then
      reply = 1
    elseif holder ~= member .. '.kept' then
      reply = 0
    end
  end
  replies[i] = reply or false
end
return replies
