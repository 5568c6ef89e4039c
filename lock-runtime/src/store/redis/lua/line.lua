-- The line of those who wait for a lock, first come first served. It is a hash:
--   ends      'first last count': the numbers of the first and the last place, and how many of the places are taken
--   <number>  'seen mode lease spare member channel': who stands there, and when it was heard of last (ms)
--   <member>  the number of its place
-- It lives for as long as somebody in it may come back: each word from one of them begins that time anew.
local STALE, FORGOTTEN, HANDED_OVER = 3000, 10000, 3000
-- A waiter polls at least this often (ms), and at the time at which the latest reply expects the lock to be free.
local LONGEST_POLL = 1000

-- The line by its field `ends` (false: nobody stands there), nil if somebody's data lie in its place.
local function line_by(queue, ends)
  if not ends then
    return {queue = queue, first = 1, last = 0, count = 0, news = {}}
  end
  local first, last, count = string.match(ends, '^(%d+) (%d+) (%d+)$')
  if not first then
    return nil
  end
  return {queue = queue, first = tonumber(first), last = tonumber(last), count = tonumber(count), news = {}}
end

-- The same, with the place of a member.
local function line_of(queue, member)
  -- Where something else than a hash lies, HMGET says so and touches nothing.
  local fields = redis.pcall('HMGET', queue, 'ends', member)
  if fields.err then
    if string.find(fields.err, 'WRONGTYPE', 1, true) then
      return nil
    end
    error(fields)
  end
  local line = line_by(queue, fields[1])
  if line then
    line.own = tonumber(fields[2])
  end
  return line
end

-- Takes a member out of its place. Nothing is left of a line in which nobody stands.
local function leave(line, place, member)
  line.count = line.count - 1
  line.changed = true
  if place == line.first then
    line.first = place + 1
  elseif place == line.last then
    line.last = place - 1
  end
  if line.count > 0 then
    redis.call('HDEL', line.queue, place, member)
  else
    redis.call('DEL', line.queue)
  end
end

-- Writes down that the member was heard of, if it stands in line; one that is forgotten does not stand there.
local function refresh(line, member)
  local entry = line.own and redis.call('HGET', line.queue, line.own)
  local seen, rest = string.match(entry or '', '^(%d+) (.+)$')
  if not seen then
    line.own = nil
  elseif now - tonumber(seen) >= FORGOTTEN then
    leave(line, line.own, member)
    line.own = nil
  else
    -- PEXPIRE comes first: a server out of memory lets it pass, and what follows the first write of a script too.
    redis.call('PEXPIRE', line.queue, FORGOTTEN)
    redis.call('HSET', line.queue, line.own, whole(now) .. ' ' .. rest)
  end
end

local function ends_of(line)
  return string.format('%.0f %.0f %.0f', line.first, line.last, line.count)
end

-- Calls a command on the line with many words, which Lua cannot hand over all at once.
local function in_parts(line, command, words)
  for from = 1, #words, 1000 do
    redis.call(command, line.queue, unpack(words, from, math.min(from + 999, #words)))
  end
end

-- Moves those in line together, in their order, and drops whom it has forgotten. Nobody is moved onto one who is still to
-- move, and a server out of memory refuses the first write, before anything is changed.
local function close_up(line)
  local old, moved, over, last = {}, {}, {}, line.first - 1
  for from = line.first, line.last, 1000 do
    local places = {}
    for place = from, math.min(from + 999, line.last) do
      table.insert(places, place)
    end
    for i, entry in ipairs(redis.call('HMGET', line.queue, unpack(places))) do
      local seen, member = string.match(entry or '', '^(%d+) %w+ %d+ %d+ (%S+) ')
      if seen then
        table.insert(old, places[i])
        if now - tonumber(seen) < FORGOTTEN then
          last = last + 1
          for _, word in ipairs({last, entry, member, last}) do
            table.insert(moved, word)
          end
        else
          table.insert(over, member)
        end
      end
    end
  end
  for _, place in ipairs(old) do
    if place > last then
      table.insert(over, place)
    end
  end
  in_parts(line, 'HSET', moved)
  in_parts(line, 'HDEL', over)
  line.last, line.count = last, last - line.first + 1
end

-- Puts a member at the end of the line. False: somebody's data lie there.
local function enqueue(line, member, mode, lease, spare, channel)
  -- Without `ends` it may be somebody's hash. Where a line ended just now there is none.
  if line.last == 0 and redis.call('TYPE', line.queue).ok ~= 'none' then
    return false
  end
  -- While a writer holds, nobody else walks over the gaps of those who gave up. As many came since it was done last.
  if line.last - line.first + 1 > 2 * line.count + 64 then
    close_up(line)
  end
  line.last = line.last + 1
  line.count = line.count + 1
  line.changed = false
  local entry = table.concat({whole(now), mode, whole(lease), whole(spare), member, channel}, ' ')
  redis.call('HSET', line.queue, 'ends', ends_of(line), line.last, entry, member, line.last)
  local kept = redis.pcall('PEXPIRE', line.queue, FORGOTTEN)
  if type(kept) == 'table' then
    -- Forbidden by the server's access rules: no line may be left that never ends.
    if line.count == 1 then
      redis.call('DEL', line.queue)
    end
    error(kept)
  end
  return true
end

-- Grants the lock to those whose turn it is, as long as its holders let them in. `kind` tells what lies under the lock's
-- name. Afterwards the line knows whether a live waiter is left (`waits`, and in `stale_in` when it is passed over unless it
-- polls), and the latest fencing token and the lease if a waiter was granted the lock. All but `own`, which gets the script's
-- reply, are sent their grants in the end (`finish`).
local function advance(line, lock, fence, kind, own)
  local latest, kept
  local place = line.first
  while place <= line.last do
    -- Who gave up leaves a gap.
    local entry = redis.call('HGET', line.queue, place) or ''
    local seen, mode, lease, spare, member, channel = string.match(entry, '^(%d+) (%w+) (%d+) (%d+) (%S+) (.+)$')
    if seen then
      local silent = now - tonumber(seen)
      if silent >= FORGOTTEN then
        leave(line, place, member)
      elseif silent >= STALE then
        -- It keeps its place, and has its turn once it is heard of again.
        kept = kept or place
      else
        local standing = kind == 'none' and 'free' or 'busy'
        if kind == 'set' and mode ~= 'exclusive' then
          standing = judge(lock, mode, member)
        end
        if standing == 'free' then
          latest = latest or counter(fence)
        end
        if standing == 'held' then
          leave(line, place, member)
        elseif standing == 'free' and latest then
          lease, spare = math.min(tonumber(lease), HANDED_OVER), tonumber(spare)
          -- The fence is written before the lock, and what names the heir after it: stopped in between by an error, the
          -- script leaves nothing that two could hold.
          local number = draw(fence, latest, spare)
          latest = number + spare
          hold(lock, mode, member, lease)
          leave(line, place, member)
          line.latest, line.lease = latest, lease
          if member ~= own then
            table.insert(line.news, {channel, table.concat({mode, member, whole(number), lease, spare, lock}, ' ')})
          end
          -- The next waiter's poll may come after the end of a short lease, which a dead process does not renew.
          line.frees = line.frees or lease < LONGEST_POLL
          kind = mode == 'exclusive' and 'string' or 'set'
          if kind == 'string' and not (lease < LONGEST_POLL) then
            line.frees = false
            place = place + 1
            break
          end
        else
          line.waits, line.stale_in = true, STALE - silent
          break
        end
      end
    end
    place = place + 1
  end
  -- The last may have left.
  line.first = math.min(kept or place, line.last + 1)
end

-- How a request stands (see `judge`) after all those had their turn who come before it.
-- A reader comes in beside a reader who stood in line before it in the same place, as one of a group.
local function approach(line, lock, fence, mode, member, beside)
  local standing, ttl, kind = judge(lock, mode, member)
  -- A writer lets nobody in.
  if line.count > 0 and (kind == 'none' or kind == 'set') then
    advance(line, lock, fence, kind, member)
    if line.latest then
      standing, ttl = judge(lock, mode, member)
    end
    if standing == 'free' and line.waits and not (beside and kind == 'set' and expiry_of(lock, beside) > now) then
      return 'busy', line.stale_in
    end
  end
  return standing, ttl
end

-- A channel that names a slot is one of a cluster, where PUBLISH would bother every node.
local function publish(channel, message)
  return redis.pcall(string.sub(channel, -1) == '}' and 'SPUBLISH' or 'PUBLISH', channel, message)
end

-- Sends the next waiter the time after which the lock may be free, if that is over before its next poll. Where no connection
-- receives it the process may be gone, and the waiter behind it is informed instead; of many such ones the polls find out.
local function remind(line, lock)
  local attempts = 8
  for place = line.first, line.last do
    local entry = redis.call('HGET', line.queue, place)
    local seen, mode, member, channel = string.match(entry or '', '^(%d+) (%w+) %d+ %d+ (%S+) (.+)$')
    if seen and now - tonumber(seen) < STALE then
      local standing, ttl = judge(lock, mode, member)
      if standing ~= 'busy' or ttl < 0 or ttl >= LONGEST_POLL then
        return
      end
      local family = permits_of(member) and 'permits' or 'lock'
      local received = publish(channel, table.concat({'kept', family, whole(ttl), lock}, ' '))
      attempts = attempts - 1
      if received ~= 0 or attempts == 0 then
        return
      end
    end
  end
end

-- Whether a live waiter stands in the line.
local function is_waited_for(line)
  for place = line.first, line.last do
    local seen = string.match(redis.call('HGET', line.queue, place) or '', '^(%d+) ')
    if seen and now - tonumber(seen) < STALE then
      return true
    end
  end
  return false
end

-- Writes the ends of the line, and publishes grants; after a change that lets a lock end earlier (`frees`) also when that is.
-- That comes last, and a failure of it is found by a poll.
local function finish(line, lock)
  if line.changed and line.count > 0 then
    redis.call('HSET', line.queue, 'ends', ends_of(line))
  end
  for _, news in ipairs(line.news) do
    publish(news[1], news[2])
  end
  if line.frees and line.count > 0 then
    remind(line, lock)
  end
end
