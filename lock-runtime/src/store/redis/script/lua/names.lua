-- Returns the names of clients, {'names', name or false, ...}. Reads only.
-- KEYS: the keys of the names, at most 1000. MGET returns nothing for a key of another type.
return {'names', unpack(redis.call('MGET', unpack(KEYS)))}
