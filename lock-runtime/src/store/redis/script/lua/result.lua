-- Returns the result of a lock that is done.
-- KEYS: lock.
-- Returns {'done', member, time of the record (microseconds), fencing token, result} | {'none'}
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
if type(holder) == 'string' then
  local member, micros, fence, from = string.match(holder, '^(%x+)%.done (%d+) (%d+) ()')
  if member then
    return {'done', member, tonumber(micros), tonumber(fence), string.sub(holder, from)}
  end
end
return {'none'}
