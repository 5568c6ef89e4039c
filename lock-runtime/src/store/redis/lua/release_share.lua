-- Gives a reader's or a permit holder's share back if the token holds it, and may keep it for nobody for a while; else
-- whoever is first in line may come in.
-- KEYS: lock, fence, queue. ARGV: member, how long to keep it (ms; 0: not at all).
-- {'released'} | {'not_held'}
--
-- A kept share belongs to another name, as a kept lock does. ZREM comes first: a server out of memory lets it pass, and
-- what follows the first write of a script too.
local lock, fence, member, keep = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local kept, keeps = member .. '.kept', false
local line = line_of(KEYS[3], member)
local kind = look(lock, 'shared')
local reply = {'not_held'}
if kind == 'set' then
  if expiry_of(lock, member) > now then
    reply = {'released'}
    if keep > 0 then
      redis.call('ZREM', lock, member, kept)
    else
      redis.call('ZREM', lock, member)
    end
    settle(lock)
    if keep > 0 then
      join(lock, kept, now + keep)
      keeps = true
    end
  elseif expiry_of(lock, kept) > now then
    reply = {'released'}
  end
end
if line and line.count > 0 then
  advance(line, lock, fence, look(lock, 'shared'))
  if keeps and line.waits then
    tell_kept(line, lock, permits_of(member) and 'permits' or 'lock', keep)
  end
  finish(line)
end
return reply
