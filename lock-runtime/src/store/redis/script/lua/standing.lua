-- The standing of a request, by reading only: 'free'; 'held' by the request's own token, and
-- 'busy', each with the remaining time (-1: unknown); 'done'; 'foreign'; 'mismatch'. The mode is
-- 'exclusive', 'shared', or the number of permits. Also returns the type of the data under the
-- lock's key (see `look`), and a writer that is in the way.
local function judge(lock, mode, member)
  local kind, last, expiry = look(lock, mode)
  if kind == 'none' then
    return 'free', nil, kind
  end
  if kind == 'foreign' then
    return 'foreign', nil, kind
  end
  local permits = tonumber(mode)
  if permits and permits < 1 then
    return 'mismatch', nil, kind
  end
  if kind == 'string' then
    if permits then
      return 'mismatch', nil, kind
    end
    last = last or redis.call('GET', lock)
    if string.sub(last, 33, 38) == '.done ' then
      return 'done', nil, kind
    end
    local ttl = redis.call('PTTL', lock)
    -- A lock of ours always has a time to live.
    if mode == 'exclusive' and ttl >= 0 and last == member then
      return 'held', ttl, kind
    end
    return 'busy', ttl, kind, last
  end
  -- One member stands for all: no member of another kind joins a set that has a live member, and
  -- the last member is alive.
  if (permits_of(last) ~= nil) ~= (permits ~= nil) then
    return 'mismatch', nil, kind
  end
  if mode == 'exclusive' then
    return 'busy', expiry - now, kind
  end
  local own = expiry_of(lock, named(member, last))
  if own > now then
    return 'held', own - now, kind
  end
  local living = '(' .. whole(now)
  local count = permits and redis.call('ZCOUNT', lock, living, '+inf') or 0
  if permits and count >= permits then
    -- The end of this one leaves fewer than the number of the request.
    local next = redis.call('ZRANGEBYSCORE', lock, living, '+inf', 'WITHSCORES', 'LIMIT', count - permits, 1)
    return 'busy', tonumber(next[2]) - now, kind
  end
  return 'free', nil, kind
end
