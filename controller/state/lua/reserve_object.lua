-- Count an object of the store to the project that sends it, before it is sent, unless it is counted already.
--
-- KEYS[1] fs:stored; KEYS[2] fs:stored:sums
-- ARGV[1] object's key; ARGV[2] project; ARGV[3] bytes; ARGV[4] most bytes of the project ('' for no limit)
-- ARGV[5] most objects of the project ('' for no limit)
--
-- Returns {1} if it is counted now, {0} if it was counted already, or {-1, bytes, objects} of the project, which has no
-- room for it.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then
  return {0}
end
local bytes = tonumber(redis.call('HGET', KEYS[2], ARGV[2] .. ':bytes') or '0')
local objects = tonumber(redis.call('HGET', KEYS[2], ARGV[2] .. ':objects') or '0')
if (ARGV[4] ~= '' and bytes + tonumber(ARGV[3]) > tonumber(ARGV[4]))
    or (ARGV[5] ~= '' and objects + 1 > tonumber(ARGV[5])) then
  return {-1, bytes, objects}
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3] .. ' ' .. ARGV[2])
redis.call('HINCRBY', KEYS[2], ARGV[2] .. ':bytes', ARGV[3])
redis.call('HINCRBY', KEYS[2], ARGV[2] .. ':objects', 1)
return {1}
