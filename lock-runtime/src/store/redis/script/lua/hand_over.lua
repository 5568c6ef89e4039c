local line = line_by(queue, ends)
if line then
  line.frees = true
  if not kept then
    advance(line, lock, fence, holder and look(lock, 'shared') or 'none')
  end
  finish(line, lock)
  if line.latest and reply[1] == 'released' then
    return {'handed_over'}
  end
end
return reply
