-- The server's time, in microseconds and milliseconds. The clocks of clients differ, and a lock
-- must end for all of them at once.
local time = redis.call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now = math.floor(micros / 1000)

-- `tostring` and `..` would write a number of this size as 1.795e+15.
local function whole(number)
  return string.format('%.0f', number)
end
