-- Remove a function with its versions, its logs and what was learned of it. Its version numbers stay taken.
--
-- KEYS[1] fs:functions; KEYS[2] fs:versions:{name}; KEYS[3] fs:functions:last; KEYS[4] fs:logs:{name}; KEYS[5] fs:measures
-- KEYS[6] and so on: fs:failures:{name}:{version} of its versions
-- ARGV[1] name; ARGV[2] record as it was read; ARGV[3] its last version number; ARGV[4] channel
-- ARGV[5] seconds for which its draining workers may still write logs; ARGV[6] and so on: its fields in KEYS[5]
--
-- Returns 1, or 0 if the record has changed since it was read.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
if tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0') < tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[3], ARGV[1], ARGV[3])
end
redis.call('DEL', KEYS[2])
for i = 6, #KEYS do
  redis.call('DEL', KEYS[i])
end
for i = 6, #ARGV do
  redis.call('HDEL', KEYS[5], ARGV[i])
end
-- Workers that drain write their last lines into the emptied stream, and these expire with it.
redis.call('XADD', KEYS[4], '*', 'line', '')
redis.call('XTRIM', KEYS[4], 'MAXLEN', 0)
redis.call('EXPIRE', KEYS[4], ARGV[5])
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
