-- Apply the writes of a scheduler's step, all or none: rejected if another controller has become the scheduler.
--
-- KEYS[1] fs:fence; KEYS[2] fs:failing
-- KEYS[2 + i] the key of write i: fs:desired:{node}, fs:copies:{node}, fs:peer_keys, fs:peer_key:{node} or
--   fs:failures:{name}:{version}
-- ARGV[1] the writer's fence, then for each write five: what, field, value, channel, message
--   set   HSET key field value          an order, of a worker or a copy; a peer key for controllers
--   del   HDEL key field                an order is taken back
--   put   SET key value                 a peer key for its node
--   fail  HSET key count .. (value is "count|last_unix_ms", message in field)
--   clear DEL key                       a failure record is cured
-- A write with a channel publishes its message.
--
-- Returns 1, or 0 if the fence is old: then nothing was written.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
for i = 3, #KEYS do
  local at = 2 + (i - 3) * 5
  local what, field, value = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  if what == 'set' then
    redis.call('HSET', KEYS[i], field, value)
  elseif what == 'del' then
    redis.call('HDEL', KEYS[i], field)
  elseif what == 'put' then
    redis.call('SET', KEYS[i], value)
  elseif what == 'fail' then
    local count, last = string.match(value, '^(%d+)|(%d+)$')
    redis.call('HSET', KEYS[i], 'count', count, 'last_unix_ms', last, 'error', field)
    redis.call('SADD', KEYS[2], KEYS[i])
  else
    redis.call('DEL', KEYS[i])
    redis.call('SREM', KEYS[2], KEYS[i])
  end
  if ARGV[at + 3] ~= '' then
    redis.call('PUBLISH', ARGV[at + 3], ARGV[at + 4])
  end
end
return 1
