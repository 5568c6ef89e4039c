-- The wait queue of a lock, first come, first served. It is a hash:
--   ends      'first last count': the first and the last position, and the number of entries
--   <number>  'seen mode lease reserved member channel': the entry at this position, and the time
--             of its last request (ms)
--   <member>  the position of the member
--   at<slot>  'member time': when the member came (ms). One slot for all positions with the same
--             remainder: earlier versions do not remove it. For operators only
-- The hash expires once no waiter can come back: each request of a waiter renews its time to live.
local ENTRY_STALE_AFTER, ENTRY_TTL, HANDOFF_LEASE = 3000, 10000, 3000
local ARRIVALS = 1024
-- A waiter polls at least this often (ms), and at the time at which the latest reply expects the
-- lock to be free.
local POLL_INTERVAL = 1000
-- The most positions of a queue: more than a server has connections for waiters. Numbers alone must
-- not keep the server busy.
local MOST_POSITIONS = 16384
-- More fencing tokens than any client reserves with a grant.
local MOST_RESERVED = 1024

-- The time since the latest request of a waiter, or until then: after the server's clock was set
-- back, an entry from before is as old as it is new.
local function silence(seen)
  return math.abs(now - tonumber(seen))
end

-- The queue from its field `ends` (false: the queue is empty); nil if the key holds foreign data.
local function line_by(queue, ends)
  if not ends then
    return {queue = queue, first = 1, last = 0, count = 0, news = {}}
  end
  local first, last, count = string.match(ends, '^(%d+) (%d+) (%d+)$')
  if not first then
    return nil
  end
  first, last, count = tonumber(first), tonumber(last), tonumber(count)
  -- Above 2^53 a Lua number is no longer exact, and a loop to it does not end.
  if first < 1 or last >= 9007199254740991 or last - first >= MOST_POSITIONS then
    return nil
  end
  return {queue = queue, first = first, last = last, count = count, news = {}}
end

-- The same, with the position of a member.
local function line_of(queue, member)
  -- On a key of another type HMGET fails and changes nothing.
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

-- Removes a member from its position. An empty queue is deleted.
local function leave(line, place, member)
  line.count = line.count - 1
  line.changed = true
  if place == line.first then
    line.first = place + 1
  elseif place == line.last then
    line.last = place - 1
  end
  if line.count > 0 then
    redis.call('HDEL', line.queue, place, member, 'at' .. place % ARRIVALS)
  else
    redis.call('DEL', line.queue)
  end
end

-- Removes a waiter of a lock that is done. The next one learns of it.
local function depart(line, member)
  if line.own then
    leave(line, line.own, member)
    line.own, line.frees = nil, true
  end
end

-- Records a request of a member that is in the queue. An entry that has expired is removed.
local function refresh(line, member)
  local entry = line.own and redis.call('HGET', line.queue, line.own)
  local seen, rest = string.match(entry or '', '^(%d+) (.+)$')
  if not seen then
    line.own = nil
  elseif silence(seen) >= ENTRY_TTL then
    leave(line, line.own, member)
    line.own = nil
  else
    -- PEXPIRE comes first: a server that is out of memory accepts it, and then also the later
    -- writes of the script.
    redis.call('PEXPIRE', line.queue, ENTRY_TTL)
    redis.call('HSET', line.queue, line.own, whole(now) .. ' ' .. rest)
  end
end

local function ends_of(line)
  return string.format('%.0f %.0f %.0f', line.first, line.last, line.count)
end

-- Calls a command on the queue with many arguments, in chunks that Lua can unpack.
local function in_parts(line, command, words)
  for from = 1, #words, 1000 do
    redis.call(command, line.queue, unpack(words, from, math.min(from + 999, #words)))
  end
end

-- Whether waiters that gave up have left more gaps than entries. The cost of closing them is
-- amortized: as many waiters have left as there are positions to read.
local function has_gaps(line)
  local span = line.last - line.first + 1
  return span > 2 * line.count + 64 or span >= MOST_POSITIONS and span > line.count
end

-- Closes the gaps between the entries, keeps their order, and drops expired entries. No entry is
-- moved onto one that is still to be moved, and a server that is out of memory refuses the first
-- write, before anything has changed.
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
        table.insert(over, 'at' .. places[i] % ARRIVALS)
        if silence(seen) < ENTRY_TTL then
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

-- Appends a member to the queue. Returns false if the key holds foreign data.
local function enqueue(line, member, mode, lease, reserved, channel)
  -- A hash without `ends` may be foreign data. A queue that has just been emptied no
  -- longer exists.
  if line.last == 0 and redis.call('TYPE', line.queue).ok ~= 'none' then
    return false
  end
  if line.count >= MOST_POSITIONS - 1 then
    return false
  end
  -- Earlier versions leave gaps to the next waiter.
  if has_gaps(line) then
    close_up(line)
  end
  line.last = line.last + 1
  line.count = line.count + 1
  line.changed = false
  local entry = table.concat({whole(now), mode, whole(lease), whole(reserved), member, channel}, ' ')
  redis.call('HSET', line.queue, 'ends', ends_of(line), line.last, entry, member, line.last,
    'at' .. line.last % ARRIVALS, member .. ' ' .. whole(now))
  local kept = redis.pcall('PEXPIRE', line.queue, ENTRY_TTL)
  if type(kept) == 'table' then
    -- Forbidden by the server's access rules. Do not leave a queue that never expires.
    if line.count == 1 then
      redis.call('DEL', line.queue)
    end
    error(kept)
  end
  return true
end

-- Grants the lock to the waiters whose turn it is, as long as the holders admit them. `kind` is
-- the type of the data under the lock's key (see `look`). Afterwards `line` has: whether a live
-- waiter is left (`waits`), and the time after which that waiter is skipped unless it polls
-- (`stale_in`); if a waiter was granted the lock, the latest fencing token and the lease
-- (`latest`, `lease`). `finish` publishes all of these grants except that of `own`, which gets the
-- reply of the script.
local function advance(line, lock, fence, kind, own)
  local latest, kept
  local place = line.first
  while place <= line.last do
    -- A waiter that gave up leaves a gap.
    local entry = redis.call('HGET', line.queue, place) or ''
    local seen, mode, lease, reserved, member, channel = string.match(entry, '^(%d+) (%w+) (%d+) (%d+) (%S+) (.+)$')
    if seen then
      local silent = silence(seen)
      if silent >= ENTRY_TTL then
        leave(line, place, member)
      elseif silent >= ENTRY_STALE_AFTER then
        -- It keeps its position, and has its turn after its next request.
        kept = kept or place
      else
        local standing = kind == 'none' and 'free' or 'busy'
        if kind == 'set' and mode ~= 'exclusive' then
          standing = judge(lock, mode, member)
          -- A client of an earlier version does not find its permit beside another number, so a
          -- waiter polls for it.
          if standing == 'free' and member ~= own and named(member, redis.call('ZRANGE', lock, -1, -1)[1]) ~= member then
            standing = 'other'
          end
        end
        if standing == 'free' then
          latest = latest or counter(fence)
        end
        if standing == 'held' then
          leave(line, place, member)
        elseif standing == 'free' and latest then
          lease = math.min(tonumber(lease), HANDOFF_LEASE)
          reserved = math.min(tonumber(reserved), MOST_RESERVED)
          -- The fence is written before the lock, and the queue and the message to the next holder
          -- after it. If an error stops the script in between, no two clients can hold the lock.
          local number = draw(fence, latest, reserved)
          latest = number + reserved
          hold(lock, mode, member, lease)
          leave(line, place, member)
          line.latest, line.lease = latest, lease
          if member ~= own then
            local grant = table.concat({mode, member, whole(number), lease, reserved, lock}, ' ')
            table.insert(line.news, {channel, grant})
          end
          -- A short lease, which a dead process does not renew, may end before the
          -- next waiter polls.
          line.frees = line.frees or lease < POLL_INTERVAL
          kind = mode == 'exclusive' and 'string' or 'set'
          if kind == 'string' and not (lease < POLL_INTERVAL) then
            line.frees = false
            place = place + 1
            break
          end
        else
          line.waits, line.stale_in = true, ENTRY_STALE_AFTER - silent
          break
        end
      end
    end
    place = place + 1
  end
  -- The last entry may have been removed.
  line.first = math.min(kept or place, line.last + 1)
end

-- The standing of a request (see `judge`) after the waiters ahead of it have had their turn. A
-- reader may enter alongside a reader that stood before it at the same position of the queue
-- (`reader_group`), as part of one group. Also returns a writer that is in the way.
local function approach(line, lock, fence, mode, member, reader_group)
  local standing, ttl, kind, holder = judge(lock, mode, member)
  -- A writer admits no other holder.
  if line.count > 0 and (kind == 'none' or kind == 'set') then
    advance(line, lock, fence, kind, member)
    if line.latest then
      standing, ttl, kind, holder = judge(lock, mode, member)
    end
    if standing == 'free' and line.waits and not (reader_group and kind == 'set' and expiry_of(lock, reader_group) > now) then
      return 'busy', line.stale_in
    end
  end
  return standing, ttl, holder
end

-- Whether the client of a writer may retain the lock: its token has a mark (`Token::marked`).
local function retains(holder)
  return holder and #holder == 32 and string.sub(holder, 11, 11) == 'f'
end

-- Notifies the client of a writer that may retain the lock that a member of another client waits,
-- with this channel. The channel of a client ends with its identifier, before any slot.
local function want(line, lock, holder, member, channel)
  local client = retains(holder) and string.sub(holder, 1, 10)
  if client and client ~= string.sub(member, 1, 10) then
    local namespace = string.match(channel, '^(.*):%x+')
    table.insert(line.news, {namespace .. ':' .. client, 'wanted ' .. holder .. ' ' .. lock})
  end
end

-- A channel that names a slot belongs to a cluster, where PUBLISH would reach every node.
local function publish(channel, message)
  return redis.pcall(string.sub(channel, -1) == '}' and 'SPUBLISH' or 'PUBLISH', channel, message)
end

-- Sends the next waiter the time after which the lock may be free, if that time ends before its
-- next poll. If no connection receives the message, the process of the waiter may be gone, and the
-- waiter behind it is notified instead. After several such waiters the rest is left to the polls.
local function remind(line, lock)
  local attempts = 8
  for place = line.first, line.last do
    local entry = redis.call('HGET', line.queue, place)
    local seen, mode, member, channel = string.match(entry or '', '^(%d+) (%w+) %d+ %d+ (%S+) (.+)$')
    if seen and silence(seen) < ENTRY_STALE_AFTER then
      local standing, ttl = judge(lock, mode, member)
      -- It is free for permits of another number. Each waiter in turn learns that it is done.
      ttl = (standing == 'free' or standing == 'done') and 0 or ttl
      if standing == 'held' or not ttl or ttl < 0 or ttl >= POLL_INTERVAL then
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

-- Whether the queue has a live waiter.
local function is_waited_for(line)
  for place = line.first, line.last do
    local seen = string.match(redis.call('HGET', line.queue, place) or '', '^(%d+) ')
    if seen and silence(seen) < ENTRY_STALE_AFTER then
      return true
    end
  end
  return false
end

-- Writes the ends of the queue and publishes the grants. After a change that lets a lock
-- end earlier (`frees`), also publishes the new end. This comes last, and a poll makes up
-- for a failure.
local function finish(line, lock)
  if line.changed and line.count > 0 then
    if has_gaps(line) then
      close_up(line)
    end
    if line.count > 0 then
      redis.call('HSET', line.queue, 'ends', ends_of(line))
    else
      redis.call('DEL', line.queue)
    end
  end
  for _, news in ipairs(line.news) do
    publish(news[1], news[2])
  end
  if line.frees and line.count > 0 then
    remind(line, lock)
  end
end
