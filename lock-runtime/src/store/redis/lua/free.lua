-- Gives back what a token may hold, while a cluster moves the slot and a script with more keys than this one would be told
-- to try again. It hands nothing over: whoever waits finds out by asking.
-- KEYS: lock. ARGV: mode, member, how long to keep it for nobody (ms; 0: not at all).
-- {'released'} | {'not_held'}
--
-- A key that this has taken away is not to be touched again: the node would look for it where the slot is moving to.
local lock, mode, member, keep = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local kept = member .. '.kept'
local kind, holder = look(lock, mode)
if mode == 'exclusive' then
  if kind == 'string' and holder == member then
    -- A server out of memory refuses SET, and lets DEL pass.
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
