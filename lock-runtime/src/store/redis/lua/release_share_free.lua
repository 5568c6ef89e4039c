-- Releases a share of a lock without waiters. Most releases find the lock in this state, and return
-- before the rest of the script (release_share.lua and the parts that it needs) runs.
-- KEYS, ARGV: those of release_share.lua.
if ARGV[2] == '0' and redis.pcall('EXISTS', KEYS[3]) == 0 then
  -- On a key of another type ZSCORE fails and changes nothing.
  local expiry = redis.pcall('ZSCORE', KEYS[1], ARGV[1])
  local time = redis.call('TIME')
  local now = math.floor((tonumber(time[1]) * 1000000 + tonumber(time[2])) / 1000)
  if type(expiry) == 'string' and tonumber(expiry) > now then
    redis.call('ZREM', KEYS[1], ARGV[1])
    -- As `settle`.
    local last = redis.call('ZRANGE', KEYS[1], -1, -1, 'WITHSCORES')[2]
    if last then
      redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', tonumber(last)))
    end
    return {'released'}
  end
end

