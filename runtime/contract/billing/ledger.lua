-- Append one row to the ledger, once.
--
-- KEYS[1] fs:ledger          stream of rows that are in no segment yet
-- KEYS[2] fs:ledger:ids      sorted set: row id -> unix ms; what makes a second writing harmless
-- KEYS[3] fs:open            hash: invocation -> OpenInvocation; the row closes it
-- KEYS[4] fs:ledger:horizon  unix ms; of rows that began earlier, ids may be in segments only
-- KEYS[5] fs:ledger:late     stream of rows whose ids the segments must be asked for, by the compaction
-- KEYS[6] fs:ledger:spent    hash: {day}:{function} -> nano-dollars of the rows booked on that day
-- ARGV[1] row id, ARGV[2] row (JSON), ARGV[3] when it began in unix ms, ARGV[4] function, ARGV[5] cost in nano-dollars
--
-- Returns 1 if the row was new, 0 if it is known, 2 if it was put aside until that is known.
--
-- An id's score is the later of the row's booking (its entry's own time) and the row's time, so all rows that began at
-- or after a moment keep their ids as long as only lower scores are removed: the horizon. And what has a lower score
-- than the last entry that was compacted is in a segment. No clock needs to agree with another for either.
redis.call('HDEL', KEYS[3], ARGV[1])
local horizon = redis.call('GET', KEYS[4])
if horizon and tonumber(ARGV[3]) < tonumber(horizon) then
  if redis.call('ZSCORE', KEYS[2], ARGV[1]) then
    return 0
  end
  redis.call('XADD', KEYS[5], '*', 'row', ARGV[2])
  return 2
end
if redis.call('ZSCORE', KEYS[2], ARGV[1]) then
  return 0
end
local entry = redis.call('XADD', KEYS[1], '*', 'row', ARGV[2])
local booked_ms = tonumber(string.match(entry, '^%d+'))
redis.call('ZADD', KEYS[2], math.max(booked_ms, tonumber(ARGV[3])), ARGV[1])
if ARGV[5] ~= '0' then
  redis.call('HINCRBY', KEYS[6], string.format('%d', math.floor(booked_ms / 86400000)) .. ':' .. ARGV[4], ARGV[5])
end
return 1
