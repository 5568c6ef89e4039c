-- Reads the key of a lock. Returns 'none', 'string' (for a writer with the value), 'set' (with the
-- member that expires last, and its expiry) or 'foreign'. The type is known before anything is
-- changed. A set of ours has a time to live, which ends with its longest holder; a set without
-- one, or with another one, is foreign data.
local function look(lock, mode)
  -- For a writer the key is usually a string, or missing. GET detects both in one command, and
  -- changes nothing on a key of another type.
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

-- The name of a holder in a set that contains `other`. All permits of a set begin with the number
-- of the first of them, as earlier versions refuse and forget a permit beside another number. The
-- present holders may have asked for different numbers.
local function named(member, other)
  local permits, token = permits_of(other or ''), string.match(member, ':.*$')
  return permits and token and permits .. token or member
end

-- The expiry of a member of a set; 0 if it is not in the set.
local function expiry_of(lock, member)
  return tonumber(redis.call('ZSCORE', lock, member) or 0)
end

-- Sets the expiry of a set to that of its longest holder: neither earlier (a writer would be
-- admitted) nor later (see `look`).
local function settle(lock)
  local last = redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES')
  if last[2] then
    redis.call('PEXPIREAT', lock, whole(tonumber(last[2])))
  end
end

-- Adds a holder to a set under its name there, or extends its lease. If the server's access rules
-- forbid one of the commands, the script fails before it has created a set that never ends, or that
-- does not end with its longest holder: the first PEXPIREAT changes nothing. A server that is out
-- of memory accepts it for a set that exists, and then also the later writes of the script.
local function join(lock, member, expiry)
  local other, last = unpack(redis.call('ZRANGE', lock, -1, -1, 'WITHSCORES'))
  last = tonumber(last or expiry)
  redis.call('PEXPIREAT', lock, whole(last))
  redis.call('ZADD', lock, whole(expiry), named(member, other))
  redis.call('PEXPIREAT', lock, whole(math.max(last, expiry)))
end

-- Records a new holder of a lock that admits it.
local function hold(lock, mode, member, lease)
  if mode == 'exclusive' then
    redis.call('SET', lock, member, 'PX', lease)
  else
    redis.call('ZREMRANGEBYSCORE', lock, '-inf', whole(now))
    join(lock, member, now + lease)
  end
end
