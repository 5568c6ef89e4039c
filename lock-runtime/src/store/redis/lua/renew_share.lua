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
-- The first PEXPIREAT changes nothing: a server that is out of memory accepts it, and then also
-- the later writes of the script. If the server's access rules forbid ZADD, the script fails
-- before the end of the set differs from that of its longest holder.
local expiry = now + lease
local last = tonumber(redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2])
redis.call('PEXPIREAT', lock, whole(last))
redis.call('ZADD', lock, 'XX', whole(expiry), member)
redis.call('PEXPIREAT', lock, whole(math.max(last, expiry)))
return lease
