-- Returns the holders and the waiters of a lock. Reads only.
-- KEYS: lock, fence, queue. ARGV: 'lock' or 'permits'.
-- Returns {'holders', counter, number of holders, mode, ttl, ..., mode, lease, silent, ...}
-- | {'foreign'} | {'foreign fence'} | {'foreign queue'}
-- The holders come first, by expiry (ttl -1: no expiry), followed by the waiters in queue order,
-- each with the time since its last request (silent, ms).
local lock, permits = KEYS[1], ARGV[1] == 'permits'
local kind, last = look(lock, 'shared')
local latest = counter(KEYS[2])
local line = line_of(KEYS[3], '')
if kind == 'foreign' or (kind == 'string' and permits) then
  return {'foreign'}
elseif not latest then
  return {'foreign fence'}
elseif not line then
  return {'foreign queue'}
end
local reply = {'holders', latest, 0}
if kind == 'string' then
  table.insert(reply, 'exclusive')
  table.insert(reply, redis.call('PTTL', lock))
elseif kind == 'set' then
  if (permits_of(last) ~= nil) ~= permits then
    return {'foreign'}
  end
  local holders = redis.call('ZRANGEBYSCORE', lock, '(' .. whole(now), '+inf', 'WITHSCORES')
  for i = 1, #holders, 2 do
    table.insert(reply, permits_of(holders[i]) or 'shared')
    table.insert(reply, tonumber(holders[i + 1]) - now)
  end
end
reply[3] = (#reply - 3) / 2
for place = line.first, line.last do
  local entry = redis.call('HGET', line.queue, place)
  local seen, mode, lease = string.match(entry or '', '^(%d+) (%w+) (%d+) ')
  local silent = seen and math.max(now - tonumber(seen), 0)
  if silent and silent < ENTRY_TTL then
    table.insert(reply, mode)
    table.insert(reply, tonumber(lease))
    table.insert(reply, silent)
  end
end
return reply
