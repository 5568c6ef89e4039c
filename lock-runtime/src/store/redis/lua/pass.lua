-- Gives an exclusive lock back and takes it up again under another token, in one step.
-- KEYS: lock, fence. ARGV: member, next member, lease (ms).
-- {'passed', fence, ttl} | {'released'} | {'not_held'} | {'foreign'}
local lock, fence, member, heir, lease = KEYS[1], KEYS[2], ARGV[1], ARGV[2], tonumber(ARGV[3])
local holder = look(lock) == 'string' and redis.call('GET', lock)

if holder == heir then
  local last = counter(fence)
  if not last then
    return {'foreign'}
  end
  return {'passed', confirm(fence, last, 'exclusive'), math.max(redis.call('PTTL', lock), 0)}
end
if holder == member .. '.kept' then
  return {'released'}
end
if holder ~= member then
  return {'not_held'}
end

local last = counter(fence)
-- DEL comes first: a server out of memory lets it pass, and what follows the first write of a script too.
redis.call('DEL', lock)
if not last then
  -- Without a fencing token there is no grant, but the lock is given back all the same.
  return {'released'}
end
local number = advance(fence, last)
redis.call('SET', lock, heir, 'PX', lease)
return {'passed', number, lease}
