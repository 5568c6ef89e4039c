-- Records since when a client holds locks as a reader or with permits. Returns {'ok'}
-- KEYS: the key of the grant times. ARGV: the time for which they are kept (ms), then the
-- identifier of each holder and the time since its grant (ms).
redis.call('DEL', KEYS[1])
for i = 2, #ARGV, 2 do
  redis.call('HSET', KEYS[1], ARGV[i], whole(now - ARGV[i + 1]))
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {'ok'}
