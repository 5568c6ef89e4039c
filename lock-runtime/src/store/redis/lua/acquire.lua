-- Grants every lock that is asked for, or none.
-- KEYS: for each request its lock and its fence.
-- ARGV: the deadline (server time, microseconds); for each request its mode, member and lease (ms).
-- {'granted', server time, fence, ttl, ...} | {'refused', server time, index, why, ttl} | {'late', server time}
if micros > tonumber(ARGV[1]) then
  return {'late', micros}
end

local requests = {}
for i = 1, #KEYS / 2 do
  local request = {
    lock = KEYS[2 * i - 1], fence = KEYS[2 * i],
    mode = ARGV[3 * i - 1], member = ARGV[3 * i], lease = tonumber(ARGV[3 * i + 1]),
  }
  local standing, ttl = judge(request.lock, request.mode, request.member)
  if standing == 'free' or standing == 'held' then
    request.counter = counter(request.fence)
    if not request.counter then
      standing = 'foreign'
    end
  end
  if standing == 'held' then
    request.ttl = ttl
  elseif standing ~= 'free' then
    return {'refused', micros, i, standing, ttl or -1}
  end
  requests[i] = request
end

local reply = {'granted', micros}
for _, request in ipairs(requests) do
  local lock, fence = request.lock, nil
  if request.ttl then
    fence = confirm(request.fence, request.counter, request.mode)
  else
    -- The fence is written before the lock. A server out of memory refuses only the first write of a script, and
    -- refusing the lock after the fence was written would do no harm; the other way round it would be held by nobody.
    fence = advance(request.fence, request.counter)
    if request.mode == 'exclusive' then
      redis.call('SET', lock, request.member, 'PX', request.lease)
    else
      redis.call('ZREMRANGEBYSCORE', lock, '-inf', whole(now))
      join(lock, request.member, now + request.lease)
    end
  end
  table.insert(reply, fence)
  table.insert(reply, request.ttl or request.lease)
end
return reply
