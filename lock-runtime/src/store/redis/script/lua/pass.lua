-- Releases an exclusive lock and acquires it under another token, in one step. If it is the turn
-- of a waiter, that waiter gets the lock, and the other token is appended to the queue.
-- KEYS: lock, fence, queue. ARGV: member, next member, lease (ms), number of fencing tokens to
-- reserve, channel for a grant.
-- Returns {'passed', fence, ttl, reserved} | {'queued', counter, ttl} | {'released'} | {'not_held'}
-- | {'foreign fence'}
local lock, fence, queue, member, next_holder = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
local lease, reserved, channel = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local kind, holder = look(lock, 'exclusive')
-- For a set this would be only one of several members.
holder = kind == 'string' and holder
-- Foreign data in place of the queue does not prevent the release.
local line = line_of(queue, next_holder) or line_by(queue, false)

if holder == next_holder or line.own then
  -- The reply to an earlier request may have been lost.
  if holder == member then
    redis.call('DEL', lock)
  end
  refresh(line, next_holder)
  local standing, ttl = approach(line, lock, fence, 'exclusive', next_holder)
  local reply = {'not_held'}
  if standing == 'held' or line.own then
    local latest = counter(fence)
    if not latest then
      reply = {'foreign fence'}
    elseif standing == 'held' then
      reply = {'passed', confirm(fence, latest, 'exclusive'), ttl, 0}
    else
      reply = {'queued', latest, ttl or redis.call('PTTL', lock)}
    end
  end
  finish(line, lock)
  return reply
end
if holder == member .. '.kept' then
  return {'released'}
end
if holder ~= member then
  if kind == 'none' or kind == 'set' then
    advance(line, lock, fence, kind)
    finish(line, lock)
  end
  return {'not_held'}
end

local latest = counter(fence)
-- DEL comes first: a server that is out of memory accepts it, and then also the later writes
-- of the script.
redis.call('DEL', lock)
if not latest then
  -- Without a fencing token there is no grant, but the lock is released all the same.
  return {'released'}
end
local reply
advance(line, lock, fence, 'none')
if line.latest then
  -- The queue is ours, so `enqueue` does not refuse.
  enqueue(line, next_holder, 'exclusive', lease, reserved, channel)
  reply = {'queued', line.latest, line.lease}
else
  reply = {'passed', draw(fence, latest, reserved), lease, reserved}
  hold(lock, 'exclusive', next_holder, lease)
end
finish(line, lock)
return reply
