-- Releases a writer's lock on a server of a quorum, and grants it to the heir that the releaser
-- names, unless another holds it or waits in this server's own queue. In most cases the script
-- ends here: the queue is empty. The second part (hand_off.lua) advances the queue.
-- KEYS: lock, fence, queue, marker of the server's data.
-- ARGV: member; the heir's member, lease (ms), number of fencing tokens to reserve, and channel;
-- the number proposed as the fencing token; the deadline (server time, microseconds); the expected
-- marker; '1' at the coordinator, which grants the lock to its own waiters only.
-- Returns {'released', server time} | {'handed_over', server time} | {'not_held', server time}
--
-- After the deadline, or without the expected data, this is the same as release.lua. As there, DEL
-- comes first, and no key is changed if the server forbids one of the reads.
local lock, fence, queue, member, heir = KEYS[1], KEYS[2], KEYS[3], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])

local holder = redis.pcall('GET', lock)
if is_error(holder) then
  return holder
end
if type(holder) == 'string' and holder ~= member then
  return {holder == member .. '.kept' and 'released' or 'not_held', micros}
end
local ends = redis.pcall('HGET', queue, 'ends')
if is_error(ends) then
  return ends
end
-- GET is permitted, so it can only fail on a key of another type.
local in_time = micros <= tonumber(ARGV[7]) and redis.pcall('GET', KEYS[4]) == ARGV[8]
-- The latest fencing token, if the heir may be granted the lock. Above 2^53 a Lua number is no
-- longer exact.
local last
if in_time and ARGV[9] ~= '1' then
  local text = redis.pcall('GET', fence)
  last = not text and 0 or type(text) == 'string' and string.match(text, '^%d+$') and tonumber(text)
  last = last and last < 9007199254740991 and last
end

local reply = {'not_held', micros}
if holder == member then
  redis.call('DEL', lock)
  holder = false
  reply[1] = 'released'
end

-- Grants the free lock to the heir. The fence is written before the lock, and the heir is notified
-- after it. The release stands if the server refuses one of the writes. A forged message may have
-- named the heir, so its lease and the count of its numbers are bounded.
local function bequeath()
  local reserved, lease = math.min(tonumber(ARGV[4]), 1024), math.min(tonumber(ARGV[3]), 3000)
  local number = math.max(last + 1, math.min(tonumber(ARGV[6]), micros + 60000000))
  if redis.pcall('SET', fence, string.format('%.0f', number + reserved), 'EX', 86400).ok and
      redis.pcall('SET', lock, heir, 'PX', lease).ok then
    local message = string.format('turn n - exclusive %s %.0f %d %d %s', heir, number, lease, reserved, lock)
    if redis.pcall('PUBLISH', ARGV[5], message) == 0 then
      -- No connection has received it: the process of the heir may be gone.
      redis.call('DEL', lock)
    elseif reply[1] == 'released' then
      reply[1] = 'handed_over'
    end
  end
end
if type(ends) ~= 'string' then
  if last and not ends and not holder then
    bequeath()
  end
  return reply
end
