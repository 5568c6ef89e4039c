-- Tells a request that stood in line how it is doing, and keeps its place. Never puts it there, and makes no grant last
-- longer.
-- KEYS: lock, fence, queue. ARGV: mode, member.
-- {'granted', fence, ttl, spare} | {'queued', counter, ttl} | {'gone'} | {'foreign'}
local lock, fence, mode, member = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local line = line_of(KEYS[3], member)
if not line then
  return {'foreign'}
end
refresh(line, member)
local standing, ttl = approach(line, lock, fence, mode, member)
local reply = {'gone'}
if standing == 'held' or line.own then
  local latest = counter(fence)
  if not latest then
    reply = {'foreign'}
  elseif standing == 'held' then
    reply = {'granted', confirm(fence, latest, mode), ttl, 0}
  else
    reply = {'queued', latest, ttl or redis.call('PTTL', lock)}
  end
end
finish(line)
return reply
