-- Returns which commands the user may not run on which keys. Runs none of them. Each command is
-- given with valid arguments, as the server does not check them here.
-- ARGV: number of keys, keys, commands with '@' in place of a key.
-- Returns 1 or 0 for each command and key: denied, allowed | false: the server is too old
local check, keys, denied = redis.acl_check_cmd, tonumber(ARGV[1]), {}
if not check then
  return false
end
for i = keys + 2, #ARGV do
  for key = 2, keys + 1 do
    local words = {}
    for word in string.gmatch(ARGV[i], '%S+') do
      table.insert(words, word == '@' and ARGV[key] or word)
    end
    table.insert(denied, check(unpack(words)) and 0 or 1)
  end
end
return denied
