local line = line_by(queue, ends)
if line and kept then
  tell_kept(line, lock, 'lock', keep)
  finish(line)
elseif line then
  advance(line, lock, fence, holder and look(lock, 'shared') or 'none')
  finish(line)
  if line.latest and reply[1] == 'released' then
    return {'handed_over'}
  end
end
return reply
