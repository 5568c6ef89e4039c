-- Releases a writer's lock if the token holds it. The second part of the script (hand_over.lua)
-- hands the lock off to the first waiter, or notifies the first waiter of the reservation.
-- KEYS: lock, fence, queue. ARGV: member, duration of the reservation (ms; 0: none); for a lock
-- that is done, also its fencing token and the result.
-- Returns {'released'} | {'handed_over'} | {'not_held'}
--
-- A reserved lock is held under a name other than that of its last holder. A late renewal or
-- abandon of that holder therefore does not affect it, and a repeated release finds that it was
-- done. DEL comes first: a server that is out of memory accepts it, and then also the later writes
-- of the script. The result of a lock that is done follows its name, and a server that is out of
-- memory refuses it: the lock stays held.
local lock, fence, queue, member, keep = KEYS[1], KEYS[2], KEYS[3], ARGV[1], tonumber(ARGV[2])

local holder = redis.pcall('GET', lock)
if is_error(holder) then
  return holder
end
local ends = redis.pcall('HGET', queue, 'ends')
if is_error(ends) then
  return ends
end

local reply, kept = {'not_held'}, false
if holder == member .. '.kept' or ARGV[3] and is_done_by(holder, member) then
  return {'released'}
elseif holder == member then
  reply = {'released'}
  if not ARGV[3] then
    redis.call('DEL', lock)
  end
  holder = false
  if ARGV[3] then
    redis.call('SET', lock, done(member, timestamp(), ARGV[3], ARGV[4]), 'PX', keep)
    kept = true
  elseif keep > 0 then
    redis.call('SET', lock, member .. '.kept', 'PX', keep)
    kept = true
  end
end
-- In most cases the script ends here: there is no waiter, or another writer holds the lock.
if type(ends) ~= 'string' or type(holder) == 'string' then
  return reply
end
