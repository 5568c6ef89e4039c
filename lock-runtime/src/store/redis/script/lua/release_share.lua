-- Releases the share of a reader or permit holder if the token holds it, and may reserve it for a
-- while. The waiters that the remaining holders admit are granted theirs.
-- KEYS: lock, fence, queue. ARGV: member, duration of the reservation (ms; 0: none).
-- Returns {'released'} | {'not_held'}
--
-- A reserved share is held under another name, as a reserved lock is (see release.lua). ZREM comes
-- first: a server that is out of memory accepts it, and then also the later writes of the script.
local lock, fence, member, keep = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
local line = line_of(KEYS[3], member)
local kind, last = look(lock, 'shared')
member = named(member, last)
local kept = member .. '.kept'
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
    end
  elseif expiry_of(lock, kept) > now then
    reply = {'released'}
  end
end
if line and line.count > 0 then
  line.frees = true
  advance(line, lock, fence, look(lock, 'shared'))
  finish(line, lock)
end
return reply
