-- Compare and set the claim of an idempotency key.
--
-- KEYS[1] fs:idempotency:{digest}
-- ARGV[1] claim as it was read ('' for none); ARGV[2] new claim ('' frees the key); ARGV[3] milliseconds that it lives
-- ARGV[4] most milliseconds that the claim as it was read may have left: with more it was renewed meanwhile ('' for any)
--
-- Returns {the claim afterwards ('' for none), the milliseconds that it has left}: not ARGV[2] if it had changed.
local known = redis.call('GET', KEYS[1]) or ''
local left = redis.call('PTTL', KEYS[1])
if known ~= ARGV[1] or (ARGV[4] ~= '' and left > tonumber(ARGV[4])) then
  return {known, left}
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return {ARGV[2], tonumber(ARGV[3])}
