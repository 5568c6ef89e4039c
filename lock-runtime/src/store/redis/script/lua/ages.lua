-- Returns the times since holders were granted their locks, {'ages', ms or false, ...}. Reads only.
-- KEYS: the keys of the grant times of their clients. ARGV: the identifiers of the holders.
local reply = {'ages'}
for i, id in ipairs(ARGV) do
  local granted = redis.pcall('HGET', KEYS[i], id)
  local at = type(granted) == 'string' and tonumber(granted)
  -- A nil would not keep its place in the reply.
  table.insert(reply, at and whole(math.max(now - at, 0)) or false)
end
return reply
