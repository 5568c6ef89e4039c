-- Returns a page of the holders and the waiters of a lock, so that no call keeps the server busy.
-- Reads only.
-- KEYS: lock, fence, queue. ARGV: 'lock' or 'permits'; the name of the lock; 'all', 'holders' or
-- 'waiters'; the number of holders that earlier pages have; the first position of waiters.
-- Returns {'holders', counter, number of holders, next number, next position, mode, ttl, id,
-- client, reserved, age, ..., mode, lease, silent, client, waited, ...} | {'foreign'} |
-- {'foreign fence'} | {'foreign queue'}
-- The next number is 0 if there are no more holders, and the next position if no more waiters. A
-- page has waiters once there are no more holders. The holders come first, by expiry (ttl -1: no
-- expiry; age -1: unknown), followed by the waiters in queue order, each with the time since its
-- last request and since it came (silent, waited, ms; waited -1: unknown).
local PAGE = 1000
local lock, permits, name = KEYS[1], ARGV[1] == 'permits', ARGV[2]
local part, skipped, from = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])
local kind, last = look(lock, 'exclusive')
local latest = counter(KEYS[2])
local line = line_of(KEYS[3], '')
if kind == 'foreign' or (kind == 'string' and permits) then
  return {'foreign'}
elseif not latest then
  return {'foreign fence'}
elseif not line then
  return {'foreign queue'}
end
local reply = {'holders', latest, 0, 0, 0}
local function add(mode, ttl, member)
  local id, client, reserved = id_of(name, member)
  local age = -1
  -- The latest token is that of the writer, and its number is the time of the grant.
  if mode == 'exclusive' and client ~= '' and latest > 0 and latest <= micros then
    age = math.floor((micros - latest) / 1000)
  end
  for _, word in ipairs({mode, ttl, id, client, reserved, age}) do
    table.insert(reply, word)
  end
end
if kind == 'string' and part ~= 'waiters' then
  add('exclusive', redis.call('PTTL', lock), last)
  reply[3] = 1
elseif kind == 'set' then
  if (permits_of(last) ~= nil) ~= permits then
    return {'foreign'}
  end
  local most = part == 'waiters' and 0 or PAGE
  local holders = redis.call('ZRANGEBYSCORE', lock, '(' .. whole(now), '+inf', 'WITHSCORES', 'LIMIT', skipped, most)
  for i = 1, #holders, 2 do
    add(permits_of(holders[i]) or 'shared', tonumber(holders[i + 1]) - now, holders[i])
  end
  reply[3] = #holders / 2
  if reply[3] == PAGE then
    reply[4] = skipped + PAGE
    return reply
  end
end
if part == 'holders' then
  return reply
end
local first = math.max(line.first, from)
local last = math.min(line.last, first + PAGE - 1)
if last < line.last then
  reply[5] = last + 1
end
for place = first, last do
  local entry, arrival = unpack(redis.call('HMGET', line.queue, place, 'at' .. place % ARRIVALS))
  local seen, mode, lease, member = string.match(entry or '', '^(%d+) (%w+) (%d+) %d+ (%S+) ')
  local silent = seen and silence(seen)
  if silent and silent < ENTRY_TTL then
    local arrived, came = string.match(arrival or '', '^(%S+) (%d+)$')
    local waited = arrived == member and math.max(now - tonumber(came), 0) or -1
    for _, word in ipairs({mode, tonumber(lease), silent, client_of(member), waited}) do
      table.insert(reply, word)
    end
  end
end
return reply
