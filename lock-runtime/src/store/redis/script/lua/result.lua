-- Returns the result of a lock that is done.
-- KEYS: lock.
-- Returns {'done', the value of the lock (see done.lua)} | {'none'}
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
return is_done(holder) and {'done', holder} or {'none'}
