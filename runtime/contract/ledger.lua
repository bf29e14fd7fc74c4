-- Append one row to the ledger, once.
--
-- KEYS[1] fs:ledger      stream of rows
-- KEYS[2] fs:ledger:ids  sorted set: row id -> unix ms; what makes a second writing harmless
-- KEYS[3] fs:open        hash: invocation -> OpenInvocation; the row closes it
-- ARGV[1] row id, ARGV[2] row (JSON), ARGV[3] now in unix ms
--
-- Returns 1 if the row was new. Ids are remembered for a week: far longer than anybody retries.
local week_ms = 604800000
redis.call('HDEL', KEYS[3], ARGV[1])
if redis.call('ZADD', KEYS[2], 'NX', ARGV[3], ARGV[1]) == 0 then
  return 0
end
redis.call('XADD', KEYS[1], '*', 'row', ARGV[2])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[3] - week_ms)
return 1
