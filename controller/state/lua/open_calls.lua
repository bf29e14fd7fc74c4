-- Open calls, but for those that have ended: an opening that was long on its way may come after its row.
--
-- KEYS[1] fs:open; KEYS[2] fs:ledger:ids
-- ARGV    invocation and OpenInvocation (JSON) of each
--
-- Returns the number of those that were opened.
local opened = 0
for at = 1, #ARGV, 2 do
  if not redis.call('ZSCORE', KEYS[2], ARGV[at]) then
    redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
    opened = opened + 1
  end
end
return opened
