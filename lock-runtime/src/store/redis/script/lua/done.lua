-- The value of a lock that is done: 'member.done', the server's time (microseconds), the fencing
-- token and the result.
local function done(member, fence, result)
  local time = redis.call('TIME')
  local micros = string.format('%.0f', tonumber(time[1]) * 1000000 + tonumber(time[2]))
  return table.concat({member .. '.done', micros, fence, result}, ' ')
end

local function is_done(holder, member)
  return type(holder) == 'string' and string.sub(holder, 1, #member + 6) == member .. '.done '
end
