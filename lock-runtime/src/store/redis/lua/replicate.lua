-- Writes something about a grant: whoever waits for the replicas after this, on the same connection, waits until they have
-- the grant as well. Only what changes something is sent to them, and PEXPIRE does every time.
-- KEYS: lock, fence. ARGV: mode, member.
-- 1; 0 if the token does not hold the lock here
local lock, fence, mode, member = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
if judge(lock, mode, member) ~= 'held' then
  return 0
end
return redis.call('PEXPIRE', fence, 86400000)
