-- Keeps a reader's or a permit holder's share for at least so long from now. Never shortens a lease and never creates
-- one. It has one key, so that renewals go on while a cluster moves the slot.
-- KEYS: lock. ARGV: mode, member, lease (ms; 0 only asks).
-- The time that is left (ms), -1 if the share is no longer held.
local lock, mode, member, lease = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local standing, ttl = judge(lock, mode, member)
if standing ~= 'held' then
  return -1
end
if lease <= ttl then
  return ttl
end
-- The first PEXPIREAT changes nothing: a server out of memory lets it pass, and what follows the first write of a
-- script too; a user whom the server forbids ZADD is told before the set has an end that is not its longest holder's.
local expiry = now + lease
local last = tonumber(redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2])
redis.call('PEXPIREAT', lock, whole(last))
redis.call('ZADD', lock, 'XX', whole(expiry), member)
redis.call('PEXPIREAT', lock, whole(math.max(last, expiry)))
return lease
