local line = line_by(queue, ends)
if line then
  if in_time then
    -- As in acquire.lua.
    base = math.min(tonumber(ARGV[6]), micros + 60000000)
    line.heir = heir
  end
  line.frees = true
  local kind = holder and look(lock, 'shared') or 'none'
  advance(line, lock, fence, kind)
  local is_next = last and kind == 'none' and not line.latest
  if is_next then
    -- It was silent for a while. It must not wait for the lock that it is granted.
    local place = tonumber(redis.call('HGET', queue, heir))
    if place then
      leave(line, place, heir)
    end
  end
  finish(line, lock)
  if is_next then
    bequeath()
  elseif line.latest and reply[1] == 'released' then
    reply[1] = 'handed_over'
  end
end
return reply
