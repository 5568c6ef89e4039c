-- Releases a share of a lock without waiters. Most releases find the lock in this state, and return
-- before the rest of the script (release_share.lua and the parts that it needs) runs.
-- KEYS, ARGV: those of release_share.lua.
if ARGV[2] == '0' and not redis.pcall('HGET', KEYS[3], 'ends') then
  -- On a key of another type these fail and change nothing.
  local expiry = redis.pcall('ZSCORE', KEYS[1], ARGV[1])
  local longest = redis.pcall('ZRANGE', KEYS[1], -2, -1, 'WITHSCORES')
  local ttl = redis.pcall('PTTL', KEYS[1])
  local time = redis.call('TIME')
  local now = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
  local last = tonumber(longest[#longest])
  -- See `look` for the expiry of a set of ours.
  if type(expiry) == 'string' and tonumber(expiry) > now and type(ttl) == 'number' and ttl >= 0 and
      last and math.abs(now + ttl - last) <= 1000 then
    redis.call('ZREM', KEYS[1], ARGV[1])
    -- See `settle`: another one may be the longest holder now.
    if longest[#longest - 1] == ARGV[1] and #longest == 4 then
      redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', tonumber(longest[2])))
    end
    return {'released'}
  end
end

