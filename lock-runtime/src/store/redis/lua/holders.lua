-- What lies under a lock's name: 'none', 'string' (with what it says, if a writer asks), 'set' (with the member that
-- expires last, and when) or 'foreign'. The type is known before anything is touched. A set of ours has a lifetime,
-- which ends with its longest holder; a set without one, or with another, is somebody's data.
local function look(lock, mode)
  -- A writer mostly meets a writer or nobody: GET tells both in one command, and touches nothing else.
  if mode == 'exclusive' then
    local holder = redis.pcall('GET', lock)
    if not holder then
      return 'none'
    end
    if type(holder) == 'string' then
      return 'string', holder
    end
    if not string.find(holder.err, 'WRONGTYPE', 1, true) then
      error(holder)
    end
  end
  local kind = redis.call('TYPE', lock).ok
  if kind == 'none' or kind == 'string' then
    return kind
  end
  if kind ~= 'zset' then
    return 'foreign'
  end
  local ttl = redis.call('PTTL', lock)
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
  local expiry = tonumber(last[2])
  if ttl < 0 or not expiry or math.abs(now + ttl - expiry) > 1000 then
    return 'foreign'
  end
  if expiry <= now then
    return 'none'
  end
  return 'set', last[1], expiry
end

-- The number of permits in a member of a set, as text; nil for a reader.
local function permits_of(member)
  return string.match(member, '^(%d+):')
end

-- When a member of a set expires; 0 if it is not there.
local function expiry_of(lock, member)
  return tonumber(redis.call('ZSCORE', lock, member) or 0)
end

-- Lets a set end with its longest holder: neither before (a writer would come in) nor after (see `look`).
local function settle(lock)
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
  if last[2] then
    redis.call('PEXPIREAT', lock, whole(tonumber(last[2])))
  end
end

-- Puts a holder into a set. A user whom the server forbids one of the commands is told before there is a set that would
-- never end, or whose end is not that of its longest holder: the first PEXPIREAT changes nothing.
local function join(lock, member, expiry)
  local last = tonumber(redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')[2] or expiry)
  redis.call('PEXPIREAT', lock, whole(last))
  redis.call('ZADD', lock, whole(expiry), member)
  redis.call('PEXPIREAT', lock, whole(math.max(last, expiry)))
end

-- Writes down a new holder of a lock that lets it in.
local function hold(lock, mode, member, lease)
  if mode == 'exclusive' then
    redis.call('SET', lock, member, 'PX', lease)
  else
    redis.call('ZREMRANGEBYSCORE', lock, '-inf', whole(now))
    join(lock, member, now + lease)
  end
end
