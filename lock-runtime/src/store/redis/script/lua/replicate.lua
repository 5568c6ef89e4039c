-- Checks grants, and writes to a key of one, so that a later WAIT on the same connection waits
-- until the replicas have them all. Only commands that change something are propagated; PEXPIRE of
-- a key that exists always is.
-- KEYS: the locks, then the fences. ARGV: the mode and the member of each.
-- Returns {1 if the token holds its lock here, otherwise 0, ...}; {} if nothing could be written.
local count, replies, written = #KEYS / 2, {}, false
-- Finds the writers by one command. Without the right to it, the result contains no member.
local writers = redis.pcall('MGET', unpack(KEYS, 1, count))
for i = 1, count do
  local member = ARGV[2 * i]
  local held = writers[i] == member or judge(KEYS[i], ARGV[2 * i - 1], member) == 'held'
  written = written or (held and redis.call('PEXPIRE', KEYS[count + i], 86400000) == 1)
  replies[i] = held and 1 or 0
end
return written and replies or {}
