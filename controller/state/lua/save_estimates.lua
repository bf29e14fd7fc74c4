-- Store the planner's estimates, fenced, and each observation once.
--
-- KEYS[1] fs:fence; KEYS[2] fs:measures; KEYS[3] fs:learned:{worker}:{what}, absent for what may be learned again
-- ARGV[1] the writer's fence, ARGV[2] how long KEYS[3] is kept, in s; then fields of KEYS[2] and their values ('' removes)
--
-- Returns 1; 0 if the fence is old; 2 if that was learned before. Only 1 has written anything.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
if KEYS[3] and not redis.call('SET', KEYS[3], '1', 'NX', 'EX', ARGV[2]) then
  return 2
end
for i = 3, #ARGV, 2 do
  if ARGV[i + 1] == '' then
    redis.call('HDEL', KEYS[2], ARGV[i])
  else
    redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  end
end
return 1
