-- Makes a writer a reader under the same token, for the time that it has left, so that no other writer comes between.
-- KEYS: lock, fence. ARGV: member.
-- {'converted', fence, ttl} | {'not_held'} | {'foreign'}
local lock, fence, member = KEYS[1], KEYS[2], ARGV[1]
local mode = 'exclusive'
local standing, ttl = judge(lock, mode, member)
if standing ~= 'held' then
  -- The reply to an earlier request may have been lost.
  mode = 'shared'
  standing, ttl = judge(lock, mode, member)
end
if standing ~= 'held' or ttl <= 0 then
  return {'not_held'}
end
local last = counter(fence)
if not last then
  return {'foreign'}
end
if mode == 'shared' then
  return {'converted', confirm(fence, last, mode), ttl}
end
-- DEL comes first: a server out of memory lets it pass, and what follows the first write of a script too.
redis.call('DEL', lock)
local number = advance(fence, last)
join(lock, member, now + ttl)
return {'converted', number, ttl}
