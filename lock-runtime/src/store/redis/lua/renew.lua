-- Keeps a writer's lock for at least so long from now. Never shortens a lease and never creates one. It has one key, so
-- that renewals go on while a cluster moves the slot; and few commands, as renewals are many.
-- KEYS: lock. ARGV: member, lease (ms; 0 only asks).
-- The time that is left (ms), -1 if the lock is no longer held: a bare number, as renewals are many.
local lock, member, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
-- Where something else than a string lies, GET says so and touches nothing; a server that forbids GET says that.
local holder = redis.pcall('GET', lock)
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
if holder ~= member then
  return -1
end
local ttl = redis.call('PTTL', lock)
-- Ours always has a lifetime.
if ttl < 0 then
  return -1
end
if lease <= ttl then
  return ttl
end
redis.call('PEXPIRE', lock, lease)
return lease
