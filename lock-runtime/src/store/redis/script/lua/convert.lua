-- Converts a writer into a reader under the same token for the remaining lease, so that no other
-- writer comes in between. The readers at the head of the queue are granted the lock with it.
-- KEYS: lock, fence, queue. ARGV: member.
-- Returns {'converted', fence, ttl, reserved} | {'not_held'} | {'foreign fence'}
local lock, fence, member = KEYS[1], KEYS[2], ARGV[1]
local line = line_of(KEYS[3], member)
local mode = 'exclusive'
local standing, ttl, kind = judge(lock, mode, member)
if standing ~= 'held' then
  -- The reply to an earlier request may have been lost.
  mode = 'shared'
  standing, ttl, kind = judge(lock, mode, member)
end
local reply = {'not_held'}
if standing == 'held' and ttl > 0 then
  local latest = counter(fence)
  if not latest then
    return {'foreign fence'}
  end
  if mode == 'shared' then
    reply = {'converted', confirm(fence, latest, mode), ttl, 0}
  else
    -- DEL comes first: a server that is out of memory accepts it, and then also the later writes
    -- of the script.
    redis.call('DEL', lock)
    reply = {'converted', draw(fence, latest, 0), ttl, 0}
    join(lock, member, now + ttl)
    kind = 'set'
  end
end
if line and line.count > 0 and (kind == 'none' or kind == 'set') then
  advance(line, lock, fence, kind)
  finish(line, lock)
end
return reply
