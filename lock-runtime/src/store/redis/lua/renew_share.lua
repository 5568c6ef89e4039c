-- Extends the lease of a reader or permit holder to at least the given time from now. Never
-- shortens or creates a lease. It has one key, so that renewals go on while a cluster
-- migrates the slot.
-- KEYS: lock. ARGV: mode, member, lease (ms; 0 only queries it).
-- Returns the remaining time (ms), or -1 if the share is no longer held.
local lock, mode, member, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local standing, ttl = judge(lock, mode, member)
if standing ~= 'held' then
  return -1
end
if lease <= ttl then
  return ttl
end
join(lock, member, now + lease)
return lease
