-- Gives a writer's lock back if the token holds it, and may keep it for nobody for a while.
-- KEYS: lock. ARGV: member, how long to keep it (ms; 0: not at all).
-- {'released'} | {'not_held'}
--
-- A kept lock belongs to another name than its last holder's, so that no late renewal or abandon of that one reaches
-- it, and a repeated release can tell that it was done. DEL comes first: a server out of memory lets it pass, and what
-- follows the first write of a script too.
local lock, member, keep = KEYS[1], ARGV[1], tonumber(ARGV[2])
-- Where something else than a string lies, GET says so and touches nothing; a server that forbids GET says that.
local holder = redis.pcall('GET', lock)
if type(holder) == 'table' and not string.find(holder.err, 'WRONGTYPE', 1, true) then
  return holder
end
if holder == member .. '.kept' then
  return {'released'}
end
if holder ~= member then
  return {'not_held'}
end
redis.call('DEL', lock)
if keep > 0 then
  redis.call('SET', lock, member .. '.kept', 'PX', keep)
end
return {'released'}
