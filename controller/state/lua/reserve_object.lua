-- Count objects of the store to the project that sends them, before they are sent: all, or none without room.
-- What is counted already stays as it is.
--
-- KEYS[1] fs:stored; KEYS[2] fs:stored:sums
-- ARGV[1] project; ARGV[2] most bytes of the project ('' for no limit); ARGV[3] most objects ('' for no limit)
-- ARGV[4...] of each object its key, and its bytes
--
-- Returns {the number of those that are counted now}, or {-1, bytes, objects} of the project, which has no room.
local new, sum = {}, 0
for at = 4, #ARGV, 2 do
  if redis.call('HEXISTS', KEYS[1], ARGV[at]) == 0 then
    new[#new + 1] = at
    sum = sum + tonumber(ARGV[at + 1])
  end
end
if #new == 0 then
  return {0}
end
local bytes = tonumber(redis.call('HGET', KEYS[2], ARGV[1] .. ':bytes') or '0')
local objects = tonumber(redis.call('HGET', KEYS[2], ARGV[1] .. ':objects') or '0')
if (ARGV[2] ~= '' and bytes + sum > tonumber(ARGV[2])) or (ARGV[3] ~= '' and objects + #new > tonumber(ARGV[3])) then
  return {-1, bytes, objects}
end
for _, at in ipairs(new) do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1] .. ' ' .. ARGV[1])
  redis.call('HINCRBY', KEYS[2], ARGV[1] .. ':bytes', ARGV[at + 1])
  redis.call('HINCRBY', KEYS[2], ARGV[1] .. ':objects', 1)
end
return {#new}
