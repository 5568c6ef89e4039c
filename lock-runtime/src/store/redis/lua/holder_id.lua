-- The identifier of a holder, a digest that reveals no value: see `HolderId`. Also returns the
-- client, which is the beginning of its tokens ('' for foreign data), and 1 for a reservation. All
-- aliases of an acquisition have the first 28 digits in common.
local TOKEN = '^(' .. string.rep('[0-9a-f]', 28) .. ')' .. string.rep('[0-9a-f]', 4) .. '(.*)$'
local function id_of(name, member)
  local stem, rest = string.match(string.match(member, '^%d+:(.+)$') or member, TOKEN)
  if not stem or (rest ~= '' and rest ~= '.kept') then
    return string.sub(redis.sha1hex(name .. '\n=' .. member), 1, 16), '', 0
  end
  local id = string.sub(redis.sha1hex(name .. '\n' .. stem .. rest), 1, 16)
  return id, string.sub(stem, 1, 10), rest == '' and 0 or 1
end

