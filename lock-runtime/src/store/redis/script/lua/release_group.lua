-- Releases the locks of several writers, each on its own. A release that finds waiters, or a
-- reservation, is left to release.lua or abandon.lua, as if it had not been sent.
-- KEYS: the locks, then the queues. ARGV: the member of each.
-- Returns {1 if the lock was released, 0 if the member did not hold it, or false, ...}
local count = #ARGV
local holders = redis.pcall('MGET', unpack(KEYS, 1, count))
local queues = redis.pcall('EXISTS', unpack(KEYS, count + 1))
if holders.err or type(queues) == 'table' then
  return {}
end
local replies, held = {}, {}
for i = 1, count do
  local reply = false
  if queues == 0 or redis.pcall('EXISTS', KEYS[count + i]) == 0 then
    if holders[i] == ARGV[i] then
      table.insert(held, KEYS[i])
      reply = 1
    elseif holders[i] ~= ARGV[i] .. '.kept' then
      reply = 0
    end
  end
  replies[i] = reply
end
if held[1] and type(redis.pcall('DEL', unpack(held))) == 'table' then
  return {}
end
return replies
