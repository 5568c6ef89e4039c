-- The parts of the value of a lock that is done: member, time of the record (microseconds), fencing
-- token, result; or none.
local function result_of(holder)
  if type(holder) == 'string' then
    local member, time, number, from = string.match(holder, '^(%x+)%.done (%d+) (%d+) ()')
    if member then
      return member, tonumber(time), tonumber(number), string.sub(holder, from)
    end
  end
end
