-- Releases the lock that a token may hold while its slot migrates in a cluster, where a script
-- with more keys would have to be retried. It does not hand off the lock: waiters find it free
-- when they poll.
-- KEYS: lock. ARGV: mode, member, duration of the reservation (ms; 0: none); for a lock that is
-- done, also its fencing token and the result.
-- Returns {'released'} | {'not_held'}
--
-- A key that this script has deleted must not be accessed again: the node would look for it at the
-- destination of the slot.
local lock, mode, member, keep = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local kind, holder = look(lock, mode)
member = named(member, kind == 'set' and holder)
local kept = member .. '.kept'
if ARGV[4] then
  if is_done_by(holder, member) then
    return {'released'}
  elseif kind ~= 'string' or holder ~= member then
    return {'not_held'}
  end
  redis.call('SET', lock, done(member, timestamp(), ARGV[4], ARGV[5]), 'PX', keep)
  return {'released'}
end
if mode == 'exclusive' then
  if kind == 'string' and holder == member then
    -- A server that is out of memory refuses SET, and accepts DEL.
    if keep == 0 or redis.pcall('SET', lock, kept, 'PX', keep).err then
      redis.call('DEL', lock)
    end
    return {'released'}
  end
  return {kind == 'string' and holder == kept and 'released' or 'not_held'}
end
if kind ~= 'set' then
  return {'not_held'}
end
if expiry_of(lock, member) <= now then
  return {expiry_of(lock, kept) > now and 'released' or 'not_held'}
end
if keep > 0 then
  join(lock, kept, now + keep)
end
local others = redis.call('ZRANGE', lock, 0, 1)[2]
redis.call('ZREM', lock, member)
if others then
  settle(lock)
end
return {'released'}
