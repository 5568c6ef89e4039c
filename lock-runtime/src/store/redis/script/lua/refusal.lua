-- On a key of another type GET and HGET fail and change nothing. A release returns any other error,
-- such as that of a server that forbids them, before it writes.
local function is_error(reply)
  return type(reply) == 'table' and not string.find(reply.err, 'WRONGTYPE', 1, true)
end
