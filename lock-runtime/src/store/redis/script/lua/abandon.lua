-- Releases any lock that a token may hold, and removes its queue entry.
-- KEYS: lock, fence, queue. ARGV: mode, member.
-- Returns {'released'} | {'not_held'}
--
-- The release comes first: a server that is out of memory accepts it, and then also the later
-- writes of the script.
local lock, fence, mode, member = KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local line = line_of(KEYS[3], member)
local kind, holder = look(lock, mode)
local reply = {'not_held'}
if mode == 'exclusive' then
  if kind == 'string' and holder == member then
    redis.call('DEL', lock)
    reply, kind = {'released'}, 'none'
  end
elseif kind == 'set' and expiry_of(lock, named(member, holder)) > now then
  redis.call('ZREM', lock, named(member, holder))
  settle(lock)
  reply, kind = {'released'}, look(lock, mode)
end
if line then
  if line.own then
    leave(line, line.own, member)
  end
  line.frees = true
  if line.count > 0 and (kind == 'none' or kind == 'set') then
    advance(line, lock, fence, kind)
  end
  finish(line, lock)
end
return reply
