-- Revokes a lock from all its holders, or from a single one. A key without an expiry may not be a
-- lock, and is left alone unless the caller includes it, or names its holder.
-- KEYS: lock, fence, queue. ARGV: 'lock' or 'permits'; 'leased', 'endless' or 'holder'; the channel
-- for the revoked members; the name of the lock, and the identifier of the holder.
-- Returns {'revoked'} | {'not_held'} | {'changed'} | {'endless'} | {'foreign'}
local lock, fence, permits, scope = KEYS[1], KEYS[2], ARGV[1] == 'permits', ARGV[2]
local kind, last = look(lock, 'exclusive')
if kind == 'foreign' or (kind == 'string' and permits) then
  return {'foreign'}
end
if kind == 'set' and (permits_of(last) ~= nil) ~= permits then
  return {'foreign'}
end
if kind == 'string' and scope == 'leased' and redis.call('PTTL', lock) < 0 then
  return {'endless'}
end
local reply, losers = {'not_held'}, {}
if kind ~= 'none' then
  local holders = {last}
  if kind == 'set' then
    holders = redis.call('ZRANGEBYSCORE', lock, '(' .. whole(now), '+inf')
  end
  for _, holder in ipairs(holders) do
    if scope ~= 'holder' or id_of(ARGV[4], holder) == ARGV[5] then
      table.insert(losers, holder)
    end
  end
  reply = {losers[1] and 'revoked' or 'changed'}
  if #losers == #holders then
    redis.call('DEL', lock)
    kind = 'none'
  elseif losers[1] then
    -- A set, and one of its members, or several aliases of one holder.
    for _, loser in ipairs(losers) do
      redis.call('ZREM', lock, loser)
    end
    settle(lock)
  end
end
-- Foreign data in place of the queue does not prevent the revocation.
local line = line_of(KEYS[3], '')
if line and line.count > 0 then
  advance(line, lock, fence, kind)
  finish(line, lock)
end
-- A foreign value is not shown to others.
local notified = {}
for _, loser in ipairs(losers) do
  if client_of(loser) ~= '' then
    table.insert(notified, loser)
  end
end
if notified[1] then
  redis.pcall('PUBLISH', ARGV[3], table.concat(notified, ' '))
end
return reply
