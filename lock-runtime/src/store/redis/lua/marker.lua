-- The marker of a server's data: the time at which it was written, by the server's clock
-- (microseconds), and a name. It is written if it is missing: the server is then new here, or has
-- lost its data.
-- KEYS: marker. ARGV: a name.
-- Returns {'marked', server time, marker, microseconds since it was written}
local marker = redis.call('GET', KEYS[1])
local since = tonumber(string.match(marker or '', '^(%d+) '))
if not since or since > micros then
  since = micros
  marker = whole(micros) .. ' ' .. ARGV[1]
  redis.call('SET', KEYS[1], marker)
end
return {'marked', micros, marker, micros - since}
