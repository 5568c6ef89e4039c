-- Writes to a key of a grant, so that a later WAIT on the same connection waits until the replicas
-- have the grant as well. Only commands that change something are propagated; PEXPIRE always is.
-- KEYS: lock, fence. ARGV: mode, member.
-- Returns 1; 0 if the token does not hold the lock here.
local lock, fence, mode, member = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
if judge(lock, mode, member) ~= 'held' then
  return 0
end
return redis.call('PEXPIRE', fence, 86400000)
