-- Append log lines to their function's log, and drop the oldest lines beyond a number and beyond two sizes.
--
-- KEYS[1] fs:logs:{name}; KEYS[2] fs:log_bytes:{project}: bytes of the logs of each of its functions
-- ARGV[1] name; ARGV[2] lines kept; ARGV[3] bytes kept of a function; ARGV[4] bytes kept of its project
-- ARGV[5] bytes kept of a function whose project has no room; ARGV[6] prefix of KEYS[1]; ARGV[7] and so on: lines
--
-- Returns the number of lines that were dropped.
local own = 0
if redis.call('EXISTS', KEYS[1]) == 1 then
  own = tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or '0')
end
for i = 7, #ARGV do
  redis.call('XADD', KEYS[1], '*', 'line', ARGV[i])
  own = own + #ARGV[i]
end

local function others()
  local sum = 0
  local fields = redis.call('HGETALL', KEYS[2])
  for i = 1, #fields, 2 do
    if fields[i] ~= ARGV[1] then
      sum = sum + tonumber(fields[i + 1])
    end
  end
  return sum
end

local room = tonumber(ARGV[4]) - others()
if own > room then
  -- Logs of removed functions expire by themselves, and are counted until somebody needs their room.
  for _, name in ipairs(redis.call('HKEYS', KEYS[2])) do
    if redis.call('EXISTS', ARGV[6] .. name) == 0 then
      redis.call('HDEL', KEYS[2], name)
    end
  end
  room = tonumber(ARGV[4]) - others()
end
local most = math.min(tonumber(ARGV[3]), math.max(room, tonumber(ARGV[5])))

local left = redis.call('XLEN', KEYS[1])
local dropped = 0
while left > 1 and (own > most or left > tonumber(ARGV[2])) do
  local page = redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', 100)
  local ids = {}
  for _, entry in ipairs(page) do
    if left > 1 and (own > most or left > tonumber(ARGV[2])) then
      ids[#ids + 1] = entry[1]
      own = math.max(0, own - #entry[2][2])
      left = left - 1
    end
  end
  redis.call('XDEL', KEYS[1], unpack(ids))
  dropped = dropped + #ids
end
redis.call('HSET', KEYS[2], ARGV[1], own)
return dropped
