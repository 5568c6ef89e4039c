-- Gives a lock back if the token holds it, and may keep it for nobody for a while.
-- KEYS: lock. ARGV: mode, member, how long to keep it (ms; 0: not at all).
-- {'released'} | {'not_held'}
--
-- A kept lock belongs to another name than its last holder's, so that no late renewal or abandon of that one reaches
-- it, and a repeated release can tell that it was done. DEL and ZREM come first: a server out of memory lets them
-- pass, and what follows the first write of a script too.
local lock, mode, member, keep = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local kept = member .. '.kept'
local kind = look(lock)

if mode == 'exclusive' then
  local holder = kind == 'string' and redis.call('GET', lock)
  if holder == kept then
    return {'released'}
  end
  if holder ~= member then
    return {'not_held'}
  end
  redis.call('DEL', lock)
  if keep > 0 then
    redis.call('SET', lock, kept, 'PX', keep)
  end
  return {'released'}
end

if kind ~= 'set' then
  return {'not_held'}
end
if expiry_of(lock, member) <= now then
  return {expiry_of(lock, kept) > now and 'released' or 'not_held'}
end
if keep > 0 then
  redis.call('ZREM', lock, member, kept)
else
  redis.call('ZREM', lock, member)
end
settle(lock)
if keep > 0 then
  join(lock, kept, now + keep)
end
return {'released'}
