-- Extends the leases of several writers to at least the given times from now, each on its own. See
-- renew.lua.
-- KEYS: the locks. ARGV: the member and the lease (ms; 0 only queries it) of each.
-- Returns {remaining time (ms), -1 if the lock is no longer held, or false if the request is left
-- to renew.lua, ...}
local holders = redis.pcall('MGET', unpack(KEYS))
if holders.err then
  return {}
end
local replies, text, lease = {}, nil, nil
for i = 1, #KEYS do
  local lock, reply = KEYS[i], -1
  if holders[i] == ARGV[2 * i - 1] then
    -- Most leases are equally long.
    if text ~= ARGV[2 * i] then
      text = ARGV[2 * i]
      lease = tonumber(text)
    end
    reply = redis.pcall('PEXPIRE', lock, text, 'GT') == 1 and lease
    if not reply then
      -- The lock has a longer lease, or none. Servers before 7.0 do not know GT.
      local ttl = redis.pcall('PTTL', lock)
      if type(ttl) == 'number' then
        local renewed = lease > ttl and ttl >= 0 and redis.pcall('PEXPIRE', lock, text)
        if renewed == 1 then
          reply = lease
        elseif not renewed then
          reply = ttl < 0 and -1 or ttl
        end
      end
    end
  end
  replies[i] = reply
end
return replies
