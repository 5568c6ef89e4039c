-- KEYS: the data, the largest token that they have seen. ARGV: the token, the new data.
local fence, seen = ARGV[1], redis.call('GET', KEYS[2]) or '0'
if not string.find(fence, '^[1-9]%d*$') then
    return redis.error_reply('ERR ' .. fence .. ' is not a fencing token')
end
-- As text, because Lua's numbers are exact up to 2^53 only.
if #fence < #seen or (#fence == #seen and fence < seen) then
    return redis.error_reply('STALE the fencing token ' .. fence .. ' is smaller than ' .. seen)
end
redis.call('SET', KEYS[2], fence)
redis.call('SET', KEYS[1], ARGV[2])
return redis.status_reply('OK')
