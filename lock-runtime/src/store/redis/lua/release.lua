-- Releases a writer's lock if the token holds it. It is handed over to the first waiter, or reserved for a while and the first
-- waiter informed, by what follows here (hand_over.lua).
-- KEYS: lock, fence, queue. ARGV: member, how long to keep it (ms; 0: not at all).
-- {'released'} | {'handed_over'} | {'not_held'}
--
-- A kept lock belongs to another name than its last holder's, so that no late renewal or abandon of that one reaches
-- it, and a repeated release can tell that it was done. DEL comes first: a server out of memory lets it pass, and what
-- follows the first write of a script too.
local lock, fence, queue, member, keep = KEYS[1], KEYS[2], KEYS[3], ARGV[1], tonumber(ARGV[2])

-- Where something else lies than is asked for, GET and HGET say so and touch nothing; a server that forbids them says that.
local function is_error(reply)
  return type(reply) == 'table' and not string.find(reply.err, 'WRONGTYPE', 1, true)
end
local holder = redis.pcall('GET', lock)
if is_error(holder) then
  return holder
end
local ends = redis.pcall('HGET', queue, 'ends')
if is_error(ends) then
  return ends
end

local reply, kept = {'not_held'}, false
if holder == member .. '.kept' then
  return {'released'}
elseif holder == member then
  reply = {'released'}
  redis.call('DEL', lock)
  holder = false
  if keep > 0 then
    redis.call('SET', lock, member .. '.kept', 'PX', keep)
    kept = true
  end
end
-- Mostly it ends here, and what follows is not even looked at: nobody waits, or another writer holds the lock.
if type(ends) ~= 'string' or type(holder) == 'string' then
  return reply
end
