-- Grants all requested locks or none. A single request may enter the wait queue.
-- KEYS: the lock, fence and queue of each request; on a server of a quorum also the
-- marker of its data.
-- ARGV: the deadline (server time, microseconds); the channel for a grant from the queue ('': do
-- not enqueue); for each request its mode, member and lease (ms), and the number of fencing tokens
-- to reserve or, for a reader, the member alongside which it may enter ahead of the waiters ('':
-- none); on a server of a quorum also the expected marker, and the number proposed as the fencing
-- token (0: none).
-- Returns {'granted', server time, fence, ttl, reserved, ...}
-- | {'queued', server time, counter, ttl}
-- | {'refused', server time, index, 'busy', ttl, 1 if the queue has a live waiter}
-- | {'refused', server time, index, 'retained', ttl}: its holder may be idle, and none waits
-- | {'refused', server time, index, 'done', the value of the lock (see done.lua)}
-- | {'refused', server time, index, reason} | {'late', server time} | {'strange', server time}
-- The reason is 'mismatch', or names the key that holds foreign data: 'foreign' (the lock),
-- 'foreign fence' or 'foreign queue'.
if micros > tonumber(ARGV[1]) then
  return {'late', micros}
end
if #KEYS % 3 == 1 then
  -- Without its data the server may have forgotten a lock that relies on its vote.
  if redis.call('GET', KEYS[#KEYS]) ~= ARGV[#ARGV - 1] then
    return {'strange', micros}
  end
  -- At most a minute ahead: a client whose clock is far ahead must not use up the
  -- numbers of a year.
  local proposal = tonumber(ARGV[#ARGV])
  if proposal > 0 then
    base = math.min(proposal, micros + 60000000)
  end
end
local channel = ARGV[2]

local requests = {}
local function answer(reply)
  for _, request in ipairs(requests) do
    finish(request.line, request.lock)
  end
  return reply
end

for i = 1, math.floor(#KEYS / 3) do
  local request = {
    lock = KEYS[3 * i - 2], fence = KEYS[3 * i - 1],
    mode = ARGV[4 * i - 1], member = ARGV[4 * i], lease = tonumber(ARGV[4 * i + 1]), reserved = 0,
  }
  local reader_group
  if request.mode == 'shared' then
    reader_group = ARGV[4 * i + 2]
  else
    request.reserved = tonumber(ARGV[4 * i + 2])
  end
  local line = line_of(KEYS[3 * i], request.member)
  if not line then
    return answer({'refused', micros, i, 'foreign queue'})
  end
  request.line = line
  requests[i] = request
  refresh(line, request.member)
  local standing, ttl, holder = approach(line, request.lock, request.fence, request.mode, request.member, reader_group)
  local queued = standing == 'busy' and channel ~= ''
  if standing == 'held' then
    request.ttl = ttl
  end
  if standing == 'free' or standing == 'held' or queued then
    request.counter = counter(request.fence)
    if not request.counter then
      standing, queued = 'foreign fence', false
    end
  end
  if queued and not line.own and
      not enqueue(line, request.member, request.mode, request.lease, request.reserved, channel) then
    standing, queued = 'foreign queue', false
  end
  if queued then
    want(line, request.lock, holder, request.member, channel)
    return answer({'queued', micros, request.counter, ttl or -1})
  end
  if standing == 'busy' then
    local is_waited = is_waited_for(line)
    if #KEYS % 3 == 0 and not is_waited and retains(holder) then
      return answer({'refused', micros, i, 'retained', ttl or -1})
    end
    return answer({'refused', micros, i, standing, ttl or -1, is_waited and 1 or 0})
  end
  if standing == 'done' then
    depart(line, request.member)
    return answer({'refused', micros, i, standing, redis.call('GET', request.lock)})
  end
  if standing ~= 'free' and standing ~= 'held' then
    return answer({'refused', micros, i, standing})
  end
end

local reply = {'granted', micros}
for _, request in ipairs(requests) do
  local grant
  if request.ttl then
    grant = {confirm(request.fence, request.counter, request.mode), request.ttl, 0}
  else
    -- Write the fence before the lock. A server that is out of memory refuses only the first write
    -- of a script. Refusing the lock after the fence was written is harmless; the other order
    -- would leave a lock without an owner.
    local number = draw(request.fence, request.counter, request.reserved)
    hold(request.lock, request.mode, request.member, request.lease)
    grant = {number, request.lease, request.reserved}
  end
  for _, word in ipairs(grant) do
    table.insert(reply, word)
  end
end
return answer(reply)
