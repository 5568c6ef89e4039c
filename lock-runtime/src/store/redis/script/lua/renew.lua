-- Extends a writer's lease to at least the given time from now. Never creates a lease, and shortens
-- one only to the time that the caller names after the server's clock was set back.
-- It has one key, so that renewals go on while a cluster migrates the slot, and few commands, as
-- renewals are frequent.
-- KEYS: lock. ARGV: member, lease (ms; 0 only queries it), the longest time left (ms; may be
-- missing).
-- Returns the remaining time (ms), or -1 if the lock is no longer held: a bare number, as
-- renewals are frequent.
local lock, member, lease = KEYS[1], ARGV[1], tonumber(ARGV[2])
local most = ARGV[3] and tonumber(ARGV[3])
-- On a key of another type GET fails and changes nothing. Any other error is returned, such as
-- that of a server that forbids GET.
local holder = redis.pcall('GET', lock)
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
if holder ~= member then
  return -1
end
local ttl = redis.call('PTTL', lock)
-- A lock of ours always has a time to live.
if ttl < 0 then
  return -1
end
if most and ttl > most then
  lease = most
elseif lease <= ttl then
  return ttl
end
redis.call('PEXPIRE', lock, lease)
return lease
