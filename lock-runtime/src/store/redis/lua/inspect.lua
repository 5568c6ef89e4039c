-- Tells who holds a lock. Reads only.
-- KEYS: lock, fence. ARGV: 'lock' or 'permits'.
-- {'holders', counter, mode, ttl, ...}, those that expire first in front, ttl -1: no expiry | {'foreign'}
local lock, permits = KEYS[1], ARGV[1] == 'permits'
local kind, last = look(lock)
local number = counter(KEYS[2])
if kind == 'foreign' or not number or (kind == 'string' and permits) then
  return {'foreign'}
end
local reply = {'holders', number}
if kind == 'string' then
  table.insert(reply, 'exclusive')
  table.insert(reply, redis.call('PTTL', lock))
elseif kind == 'set' then
  if (permits_of(last) ~= nil) ~= permits then
    return {'foreign'}
  end
  local holders = redis.call('ZRANGEBYSCORE', lock, '(' .. whole(now), '+inf', 'WITHSCORES')
  for i = 1, #holders, 2 do
    table.insert(reply, permits_of(holders[i]) or 'shared')
    table.insert(reply, tonumber(holders[i + 1]) - now)
  end
end
return reply
