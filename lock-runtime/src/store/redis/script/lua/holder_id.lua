-- The identifier of a holder, a digest that reveals no value: see `HolderId`. Also returns the
-- client, which is the beginning of its tokens ('' for foreign data), and 1 for a reservation, or 2
-- for one with a result. All aliases of an acquisition have the first 28 digits in common.
local TOKEN = '^(' .. string.rep('[0-9a-f]', 28) .. ')' .. string.rep('[0-9a-f]', 4) .. '(.*)$'
local function token_of(member)
  local stem, rest = string.match(string.match(member, '^%d+:(.+)$') or member, TOKEN)
  if rest and string.sub(rest, 1, 6) == '.done ' then
    return stem, '.kept', 2
  end
  if stem and (rest == '' or rest == '.kept') then
    return stem, rest, rest == '' and 0 or 1
  end
end
local function client_of(member)
  return string.sub(token_of(member) or '', 1, 10)
end
local function id_of(name, member)
  local stem, rest, state = token_of(member)
  if not stem then
    -- Foreign data may be long.
    if #member > 4096 then
      member = #member .. string.sub(member, 1, 2048) .. string.sub(member, -2048)
    end
    return string.sub(redis.sha1hex(name .. '\n=' .. member), 1, 16), '', 0
  end
  local id = string.sub(redis.sha1hex(name .. '\n' .. stem .. rest), 1, 16)
  return id, string.sub(stem, 1, 10), state
end

