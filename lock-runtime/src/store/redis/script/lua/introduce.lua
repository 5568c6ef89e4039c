-- Records the name of a client. Returns {'ok'}
-- KEYS: the key of the name. ARGV: the name, and the time for which it is kept (ms).
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'ok'}
