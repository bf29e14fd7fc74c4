-- Compare and set a function's record, with its new version.
--
-- KEYS[1] fs:functions; KEYS[2] fs:versions:{name}; KEYS[3] fs:failures:{name}:{version}; KEYS[4] fs:removals
-- KEYS[5] fs:functions:last; KEYS[6] fs:logs:{name}
-- ARGV[1] name; ARGV[2] record as it was read ('' for none); ARGV[3] new record
-- ARGV[4] version number; ARGV[5] version record ('' if it stands already); ARGV[6] channel
-- ARGV[7], ARGV[8] and so on: an object that the version needs, and its mark in KEYS[4] ('' for none)
--
-- Returns 1, or 0 if the record has changed since it was read, the version's number is taken, or the removal of what
-- it needs has begun. Numbers grow, also over the removal of a function: `@3` is one code for ever.
for i = 7, #ARGV, 2 do
  if (redis.call('HGET', KEYS[4], ARGV[i]) or '') ~= ARGV[i + 1] then
    return 0
  end
end
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
if ARGV[5] ~= '' then
  if tonumber(redis.call('HGET', KEYS[5], ARGV[1]) or '0') >= tonumber(ARGV[4]) then
    return 0
  end
  if redis.call('HSETNX', KEYS[2], ARGV[4], ARGV[5]) == 0 then
    return 0
  end
  redis.call('HSET', KEYS[5], ARGV[1], ARGV[4])
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[6])  -- what an earlier function of the name has logged
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
redis.call('DEL', KEYS[3])
redis.call('PUBLISH', ARGV[6], ARGV[1])
return 1
