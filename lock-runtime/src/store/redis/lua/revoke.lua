-- Takes a lock away from whoever holds it. What has no expiry may not be a lock, and is left alone unless that is asked for.
-- KEYS: lock. ARGV: 'lock' or 'permits'; 'leased' or 'endless'.
-- {'revoked'} | {'not_held'} | {'endless'} | {'foreign'}
local lock, permits = KEYS[1], ARGV[1] == 'permits'
local kind, last = look(lock)
if kind == 'none' then
  return {'not_held'}
end
if kind == 'foreign' or (kind == 'string' and permits) then
  return {'foreign'}
end
if kind == 'set' and (permits_of(last) ~= nil) ~= permits then
  return {'foreign'}
end
if kind == 'string' and ARGV[2] ~= 'endless' and redis.call('PTTL', lock) < 0 then
  return {'endless'}
end
redis.call('DEL', lock)
return {'revoked'}
