-- Extends the lease of a reader or permit holder to at least the given time from now. Never creates
-- a lease, and shortens one only to the time that the caller names after the server's clock was set
-- back. It has one key, so that renewals go on while a cluster migrates the slot.
-- KEYS: lock. ARGV: mode, member, lease (ms; 0 only queries it), the longest time left (ms; may be
-- missing).
-- Returns the remaining time (ms), or -1 if the share is no longer held.
local lock, mode, member, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local most = ARGV[4] and tonumber(ARGV[4])
local standing, ttl = judge(lock, mode, member)
if standing ~= 'held' then
  return -1
end
if most and ttl > most then
  lease = most
elseif lease <= ttl then
  return ttl
end
join(lock, member, now + lease)
if most then
  settle(lock)
end
return lease
