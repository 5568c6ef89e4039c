-- Revokes a lock from all its holders. A key without an expiry may not be a lock, and is left
-- alone unless the caller includes it.
-- KEYS: lock, fence, queue. ARGV: 'lock' or 'permits'; 'leased' or 'endless'; the channel for the
-- revoked members.
-- Returns {'revoked'} | {'not_held'} | {'endless'} | {'foreign'}
local lock, fence, permits = KEYS[1], KEYS[2], ARGV[1] == 'permits'
local kind, last = look(lock, 'exclusive')
if kind == 'foreign' or (kind == 'string' and permits) then
  return {'foreign'}
end
if kind == 'set' and (permits_of(last) ~= nil) ~= permits then
  return {'foreign'}
end
if kind == 'string' and ARGV[2] ~= 'endless' and redis.call('PTTL', lock) < 0 then
  return {'endless'}
end
local reply, losers = {'not_held'}, {}
if kind ~= 'none' then
  losers = kind == 'string' and {last} or redis.call('ZRANGE', lock, 0, -1)
  redis.call('DEL', lock)
  reply = {'revoked'}
end
-- Foreign data in place of the queue does not prevent the revocation.
local line = line_of(KEYS[3], '')
if line and line.count > 0 then
  advance(line, lock, fence, 'none')
  finish(line, lock)
end
if losers[1] then
  redis.pcall('PUBLISH', ARGV[3], table.concat(losers, ' '))
end
return reply
