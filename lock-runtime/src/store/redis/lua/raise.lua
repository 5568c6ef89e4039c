-- Makes the fencing token of the next grant larger than a number. Never makes it smaller.
-- KEYS: fence. ARGV: the number.
-- {'raised'} | {'foreign'}
local latest, number = counter(KEYS[1]), tonumber(ARGV[1])
if not latest then
  return {'foreign'}
end
if latest < number then
  redis.call('SET', KEYS[1], whole(number), 'EX', 86400)
end
return {'raised'}
