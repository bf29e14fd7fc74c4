-- Book a row from before the horizon, or drop it, after it was looked up in the segments.
--
-- KEYS[1] fs:ledger:late; KEYS[2] fs:ledger:ids; KEYS[3] fs:ledger; KEYS[4] fs:ledger:segments; KEYS[5] fs:ledger:spent
-- ARGV[1] entry in KEYS[1], ARGV[2] row id, ARGV[3] row (JSON; '' if a segment has it), ARGV[4] function, ARGV[5] cost
-- ARGV[6] number of segments at the time of the look-up
--
-- Returns 1 if it is booked, 0 if it was known; -1, and nothing is done, if there are more segments now: look up again.
if redis.call('HLEN', KEYS[4]) ~= tonumber(ARGV[6]) then
  return -1
end
if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 or ARGV[3] == '' then
  return 0
end
if redis.call('ZSCORE', KEYS[2], ARGV[2]) then
  return 0
end
local entry = redis.call('XADD', KEYS[3], '*', 'row', ARGV[3])
local booked_ms = tonumber(string.match(entry, '^%d+'))
redis.call('ZADD', KEYS[2], booked_ms, ARGV[2])
if ARGV[5] ~= '0' then
  redis.call('HINCRBY', KEYS[5], string.format('%d', math.floor(booked_ms / 86400000)) .. ':' .. ARGV[4], ARGV[5])
end
return 1
