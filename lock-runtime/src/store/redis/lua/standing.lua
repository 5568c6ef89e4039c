-- How a request stands, by reading only: 'free'; 'held', by the request's own token, for so long; 'busy', for so long
-- (-1: not known); 'foreign'; 'mismatch'. The mode is 'exclusive', 'shared', or the number of permits. Also what lies
-- under the lock's name.
local function judge(lock, mode, member)
  local kind, last, expiry = look(lock, mode)
  if kind == 'none' then
    return 'free', nil, kind
  end
  if kind == 'foreign' then
    return 'foreign', nil, kind
  end
  local permits = tonumber(mode)
  if kind == 'string' then
    if permits then
      return 'mismatch', nil, kind
    end
    local ttl = redis.call('PTTL', lock)
    -- Ours always has a lifetime.
    if mode == 'exclusive' and ttl >= 0 and last == member then
      return 'held', ttl, kind
    end
    return 'busy', ttl, kind
  end
  -- One member speaks for all: nobody joins a set of another shape while somebody in it is alive, and the last is.
  if permits_of(last) ~= string.match(mode, '^%d+$') then
    return 'mismatch', nil, kind
  end
  if mode == 'exclusive' then
    return 'busy', expiry - now, kind
  end
  local own = expiry_of(lock, member)
  if own > now then
    return 'held', own - now, kind
  end
  local living = '(' .. whole(now)
  if permits and redis.call('ZCOUNT', lock, living, '+inf') >= permits then
    local first = redis.call('ZRANGEBYSCORE', lock, living, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    return 'busy', tonumber(first[2]) - now, kind
  end
  return 'free', nil, kind
end
