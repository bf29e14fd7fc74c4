-- Replace the set of workers that are kept because of `min`, fenced.
--
-- KEYS[1] fs:fence; KEYS[2] fs:kept
-- ARGV[1] the writer's fence, then workers
--
-- Returns 1, or 0 if the fence is old: then nothing was written.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('DEL', KEYS[2])
for i = 2, #ARGV do
  redis.call('HSET', KEYS[2], ARGV[i], '1')
end
return 1
