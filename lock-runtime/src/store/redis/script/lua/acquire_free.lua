-- Grants a single lock that has neither holders nor waiters, and refuses one that is done and has
-- no waiters. Most requests find the lock in such a state, and return before the rest of the script
-- (acquire.lua and the parts that it needs) runs.
-- KEYS, ARGV: those of acquire.lua.
--
-- On a key of another type GET and HGET fail and change nothing.
if #KEYS < 6 then
  local holder = redis.pcall('GET', KEYS[1])
  if (not holder or is_done(holder)) and not redis.pcall('HGET', KEYS[3], 'ends') then
    local time = redis.call('TIME')
    local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
    local is_late = micros > tonumber(ARGV[1])
    if holder and not is_late then
      return {'refused', micros, 1, 'done', holder}
    end
    local base, known = micros, true
    if #KEYS == 4 then
      known = redis.call('GET', KEYS[4]) == ARGV[#ARGV - 1]
      local proposal = tonumber(ARGV[#ARGV])
      if proposal > 0 then
        base = math.min(proposal, micros + 60000000)
      end
    end
    -- Above 2^53 a Lua number is no longer exact.
    local text = redis.pcall('GET', KEYS[2])
    local last = not text and 0 or type(text) == 'string' and string.match(text, '^%d+$') and tonumber(text)
    if known and not is_late and last and last < 9007199254740991 then
      local number, lease = math.max(last + 1, base), tonumber(ARGV[5])
      if ARGV[3] == 'exclusive' then
        -- A server that is out of memory, or that forbids SET, refuses this one.
        redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
        local reserved = tonumber(ARGV[6])
        redis.call('SET', KEYS[2], string.format('%.0f', number + reserved), 'EX', 86400)
        return {'granted', micros, number, lease, reserved}
      end
      -- In the order of `draw` and `join`, for the same reasons.
      local expiry = string.format('%.0f', math.floor(micros / 1000) + lease)
      redis.call('SET', KEYS[2], string.format('%.0f', number), 'EX', 86400)
      redis.call('PEXPIREAT', KEYS[1], expiry)
      redis.call('ZADD', KEYS[1], expiry, ARGV[4])
      redis.call('PEXPIREAT', KEYS[1], expiry)
      return {'granted', micros, number, lease, 0}
    end
  end
end

