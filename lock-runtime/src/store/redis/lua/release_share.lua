-- Gives a reader's or a permit holder's share back if the token holds it, and may keep it for nobody for a while.
-- KEYS: lock. ARGV: member, how long to keep it (ms; 0: not at all).
-- {'released'} | {'not_held'}
--
-- A kept share belongs to another name, as a kept lock does. ZREM comes first: a server out of memory lets it pass, and
-- what follows the first write of a script too.
local lock, member, keep = KEYS[1], ARGV[1], tonumber(ARGV[2])
local kept = member .. '.kept'
if look(lock) ~= 'set' then
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
