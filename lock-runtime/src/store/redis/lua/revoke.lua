-- Takes a lock away from whoever holds it. What has no expiry may not be a lock, and is left alone unless that is asked for.
-- KEYS: lock, fence, queue. ARGV: 'lock' or 'permits'; 'leased' or 'endless'; where to tell who lost it.
-- {'revoked'} | {'not_held'} | {'endless'} | {'foreign'}
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
-- Somebody's data in the place of the line keep no lock from being revoked.
local line = line_of(KEYS[3], '')
if line and line.count > 0 then
  advance(line, lock, fence, 'none')
  finish(line, lock)
end
if losers[1] then
  redis.pcall('PUBLISH', ARGV[3], table.concat(losers, ' '))
end
return reply
