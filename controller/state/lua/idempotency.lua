-- Compare and set the claim of an idempotency key.
--
-- KEYS[1] fs:idempotency:{digest}
-- ARGV[1] claim as it was read ('' for none); ARGV[2] new claim ('' frees the key); ARGV[3] milliseconds that it lives
-- ARGV[4] most milliseconds that the claim as it was read may have left: with more it was renewed meanwhile ('' for any)
-- ARGV[5] '1' asks also if this Redis takes writes, as a renewal is one: then a claim that stands is written again
--
-- Returns {the claim afterwards ('' for none), the milliseconds that it has left, 0 if writes are refused}: not ARGV[2]
-- if it had changed.
local known = redis.call('GET', KEYS[1]) or ''
local left = redis.call('PTTL', KEYS[1])
if known ~= ARGV[1] or (ARGV[4] ~= '' and left > tonumber(ARGV[4])) then
  local wrote = ARGV[5] == '1' and known ~= '' and redis.pcall('SET', KEYS[1], known, 'KEEPTTL')
  return {known, left, type(wrote) == 'table' and wrote.err and 0 or 1}
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {ARGV[2], tonumber(ARGV[3]), 1}
