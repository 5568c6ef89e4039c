-- Returns the result of a lock that is done.
-- KEYS: lock.
-- Returns {'done', member, time of the record (microseconds), fencing token, result} | {'none'}
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
local reply = {'done', result_of(holder)}
return reply[2] and reply or {'none'}
