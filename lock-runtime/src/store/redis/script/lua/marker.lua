-- The marker of a server's data: the time at which it was written, by the server's clock
-- (microseconds), and a name. It is written if it is missing: the server is then new here, or has
-- lost its data. Also the settings that all clients share: those of the first client. They are not
-- replaced, as a client that has found them may be connected still.
-- KEYS: marker, settings. ARGV: a name; the settings, which begin with the longest lease (ms).
-- Returns {'marked', server time, marker, microseconds since it was written, settings}
local marker, settings = redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])
local since = tonumber(string.match(marker or '', '^(%d+) '))
if not since or since > micros then
  since = micros
  marker = whole(micros) .. ' ' .. ARGV[1]
  redis.call('SET', KEYS[1], marker)
end
if not settings then
  settings = ARGV[2]
  redis.call('SET', KEYS[2], settings)
end
return {'marked', micros, marker, micros - since, settings}
