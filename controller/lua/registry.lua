-- Change a function's record if nobody else did since it was read.
--
-- KEYS[1] fs:functions; KEYS[2] fs:versions:{name}; KEYS[3] fs:failures:{name}:{version}
-- ARGV[1] name; ARGV[2] record as it was read ('' for none); ARGV[3] new record ('' deletes the function)
-- ARGV[4] version number; ARGV[5] version record ('' if it stands already); ARGV[6] channel
--
-- Returns 1, or 0 if the record is another by now, or the version's number is taken: read again.
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
