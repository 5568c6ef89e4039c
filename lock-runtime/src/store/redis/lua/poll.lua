-- Tells a request whether it holds its lock. Changes nothing but the fencing token of a reader (see `confirm`).
-- KEYS: lock, fence. ARGV: mode, member.
-- {'granted', fence, ttl} | {'gone'} | {'foreign'}
local standing, ttl = judge(KEYS[1], ARGV[1], ARGV[2])
if standing ~= 'held' then
  return {'gone'}
end
local last = counter(KEYS[2])
if not last then
  return {'foreign'}
end
return {'granted', confirm(KEYS[2], last, ARGV[1]), ttl}
