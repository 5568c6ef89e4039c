local line = line_by(queue, ends)
if line then
  advance(line, lock, fence, holder and look(lock, 'shared') or 'none')
  finish(line)
end
return reply
