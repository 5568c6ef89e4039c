-- The server's time (microseconds), as text.
local function timestamp()
  local time = redis.call('TIME')
  return time[1] .. string.format('%06d', time[2])
end

-- The value of a lock that is done: 'member.done', the time of the record, the fencing token and
-- the result.
local function done(member, time, fence, result)
  return table.concat({member .. '.done', time, fence, result}, ' ')
end

local function is_done_by(holder, member)
  return type(holder) == 'string' and string.sub(holder, 1, #member + 6) == member .. '.done '
end
