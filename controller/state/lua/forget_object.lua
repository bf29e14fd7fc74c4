-- Take an object off its project's account: it was deleted, or did not come.
--
-- KEYS[1] fs:stored; KEYS[2] fs:stored:sums
-- ARGV[1] object's key
--
-- Returns 1, or 0 if it was not counted.
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if not entry then
  return 0
end
local bytes, project = string.match(entry, '^(%d+) (.+)$')
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HINCRBY', KEYS[2], project .. ':bytes', -tonumber(bytes))
redis.call('HINCRBY', KEYS[2], project .. ':objects', -1)
return 1
