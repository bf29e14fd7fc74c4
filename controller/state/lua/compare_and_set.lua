-- Compare and set one field of a hash.
--
-- KEYS[1] the hash
-- ARGV[1] field; ARGV[2] value as it was read ('' for none); ARGV[3] new value ('' deletes the field)
-- ARGV[4] channel on which the field's name is published
--
-- Returns 1, or 0 if the value has changed since it was read.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
if ARGV[3] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
end
redis.call('PUBLISH', ARGV[4], ARGV[1])
return 1
