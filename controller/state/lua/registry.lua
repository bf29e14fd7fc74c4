-- Compare and set a function's record, with its new version.
--
-- KEYS[1] fs:functions; KEYS[2] fs:versions:{name}; KEYS[3] fs:failures:{name}:{version}; KEYS[4] fs:removals
-- ARGV[1] name; ARGV[2] record as it was read ('' for none); ARGV[3] new record ('' deletes the function)
-- ARGV[4] version number; ARGV[5] version record ('' if it stands already); ARGV[6] channel
-- ARGV[7], ARGV[8] and so on: a checkpoint that the version needs, and its mark in KEYS[4] ('' for none)
--
-- Returns 1, or 0 if the record has changed since it was read, the version's number is taken, or the removal of its
-- weights has begun.
for i = 7, #ARGV, 2 do
  if (redis.call('HGET', KEYS[4], ARGV[i]) or '') ~= ARGV[i + 1] then
    return 0
  end
end
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
if ARGV[5] ~= '' and redis.call('HSETNX', KEYS[2], ARGV[4], ARGV[5]) == 0 then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
redis.call('DEL', KEYS[3])
redis.call('PUBLISH', ARGV[6], ARGV[1])
return 1
