-- Makes the fencing token of the next grant larger than a number, and gives that number to the
-- caller alone. Never lowers it.
-- KEYS: fence; on a server of a quorum also the marker of its data. ARGV: the number; the
-- expected marker.
-- Returns {'raised'} | {'not_raised', latest} | {'foreign fence'} | {'strange'}
--
-- Without its data the server may have given the number away before.
if KEYS[2] and redis.call('GET', KEYS[2]) ~= ARGV[2] then
  return {'strange'}
end
local latest, number = counter(KEYS[1]), tonumber(ARGV[1])
if not latest then
  return {'foreign fence'}
end
if latest >= number then
  return {'not_raised', latest}
end
redis.call('SET', KEYS[1], whole(number), 'EX', 86400)
return {'raised'}
