-- Remove old versions of a function, with what was learned of their starts.
--
-- KEYS[1] fs:functions; KEYS[2] fs:versions:{name}; KEYS[3] fs:measures; KEYS[4] and so on: their fs:failures
-- ARGV[1] name; ARGV[2] its record as it was read; ARGV[3] number of versions; then the versions; then their fields in
-- KEYS[3]
--
-- Returns 1, or 0 if the function's record has changed since it was read: one of them may be in service now.
if (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[2] then
  return 0
end
local count = tonumber(ARGV[3])
for i = 4, 3 + count do
  redis.call('HDEL', KEYS[2], ARGV[i])
end
for i = 4 + count, #ARGV do
  redis.call('HDEL', KEYS[3], ARGV[i])
end
for i = 4, #KEYS do
  redis.call('DEL', KEYS[i])
end
return 1
