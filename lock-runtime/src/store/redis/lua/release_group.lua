-- Releases the locks of several writers, each on its own. A release that does not find its lock
-- held and without waiters is left to release.lua, as if it had not been sent.
-- KEYS: the lock and queue of each. ARGV: the member of each.
-- Returns {1 or false, ...}
local replies = {}
for i = 1, #ARGV do
  local lock = KEYS[2 * i - 1]
  local done = redis.pcall('GET', lock) == ARGV[i] and not redis.pcall('HGET', KEYS[2 * i], 'ends') and
    redis.pcall('DEL', lock)
  replies[i] = done == 1 and 1 or false
end
return replies
