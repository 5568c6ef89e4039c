-- Releases the locks of several writers, each on its own. A release that does not find its lock
-- held and without waiters is left to release.lua, as if it had not been sent.
-- KEYS: the locks, then the queues. ARGV: the member of each.
-- Returns {1 or false, ...}
local count = #ARGV
local holders = redis.pcall('MGET', unpack(KEYS, 1, count))
local queues = redis.pcall('EXISTS', unpack(KEYS, count + 1))
if holders.err or type(queues) == 'table' then
  return {}
end
local replies, held = {}, {}
for i = 1, count do
  replies[i] = false
  if holders[i] == ARGV[i] and (queues == 0 or redis.pcall('EXISTS', KEYS[count + i]) == 0) then
    replies[i] = 1
    table.insert(held, KEYS[i])
  end
end
if held[1] and type(redis.pcall('DEL', unpack(held))) == 'table' then
  return {}
end
return replies
