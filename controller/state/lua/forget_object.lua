-- Take objects off the account that they are counted to: they were deleted, or did not come.
--
-- KEYS[1] fs:stored; KEYS[2] fs:stored:sums
-- ARGV[1] project: what is counted to others stays ('' for anybody's); ARGV[2...] objects' keys
--
-- Returns how many were counted.
local forgotten = 0
for at = 2, #ARGV do
  local entry = redis.call('HGET', KEYS[1], ARGV[at])
  local bytes, project = string.match(entry or '', '^(%d+) (.+)$')
  if project and (ARGV[1] == '' or ARGV[1] == project) then
    redis.call('HDEL', KEYS[1], ARGV[at])
    redis.call('HINCRBY', KEYS[2], project .. ':bytes', -tonumber(bytes))
    redis.call('HINCRBY', KEYS[2], project .. ':objects', -1)
    forgotten = forgotten + 1
  end
end
return forgotten
