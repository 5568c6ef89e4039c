-- Returns the state of a queued request, and keeps its queue entry. Never enqueues it, and never
-- extends a grant.
-- KEYS: lock, fence, queue. ARGV: mode, member.
-- Returns {'granted', fence, ttl, reserved} | {'queued', counter, ttl} | {'gone'}
-- | {'done', the value of the lock (see done.lua)}
-- | {'foreign'} | {'foreign fence'} | {'foreign queue'}
local lock, fence, mode, member = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local line = line_of(KEYS[3], member)
if not line then
  return {'foreign queue'}
end
refresh(line, member)
local standing, ttl, holder = approach(line, lock, fence, mode, member)
local reply = {'gone'}
if standing == 'done' then
  reply = {'done', redis.call('GET', lock)}
  depart(line, member)
elseif standing == 'foreign' and line.own then
  reply = {'foreign'}
elseif standing == 'held' or line.own then
  local latest = counter(fence)
  if not latest then
    reply = {'foreign fence'}
  elseif standing == 'held' then
    reply = {'granted', confirm(fence, latest, mode), ttl, 0}
  else
    reply = {'queued', latest, ttl or redis.call('PTTL', lock)}
    if retains(holder) then
      want(line, lock, holder, member, string.match(redis.call('HGET', line.queue, line.own), '^%d+ %w+ %d+ %d+ %S+ (.+)$'))
    end
  end
end
finish(line, lock)
return reply
