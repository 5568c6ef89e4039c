-- Returns whether the value of a lock's key is that of a lock that is done (see done.lua).
local function is_done(holder)
  return type(holder) == 'string' and string.sub(holder, 33, 38) == '.done '
end
