-- The marker of a server's data: when it was written, by the server's clock (microseconds), and a name. It is written where it
-- is missing: then the server is new here, or has lost its data.
-- KEYS: marker. ARGV: a name.
-- {'marked', server time, marker, microseconds since}
local marker = redis.call('GET', KEYS[1])
local since = tonumber(string.match(marker or '', '^(%d+) '))
if not since or since > micros then
  since = micros
  marker = whole(micros) .. ' ' .. ARGV[1]
  redis.call('SET', KEYS[1], marker)
end
return {'marked', micros, marker, micros - since}
