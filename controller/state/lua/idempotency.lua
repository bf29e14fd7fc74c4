-- Compare and set the claim of an idempotency key.
--
-- KEYS[1] fs:idempotency:{digest}
-- ARGV[1] claim as it was read ('' for none); ARGV[2] new claim ('' frees the key); ARGV[3] milliseconds that it lives
--
-- Returns the claim afterwards ('' for none): not ARGV[2] if it had changed since it was read.
local known = redis.call('GET', KEYS[1]) or ''
if known ~= ARGV[1] then
  return known
end
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
end
return ARGV[2]
