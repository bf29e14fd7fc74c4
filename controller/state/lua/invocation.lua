-- Compare and set an invocation's state, together with its timers.
--
-- KEYS[1] fs:invocation:{id}; KEYS[2] fs:invocations:due:{function}; KEYS[3] fs:invocations:functions
-- KEYS[4] fs:invocations:kept; KEYS[5] fs:invocations:index; KEYS[6] fs:invocation:events:{id}
-- KEYS[7] fs:invocations:timers
-- ARGV[1] id; ARGV[2] function; ARGV[3] state as it was read ('' for none); ARGV[4] new state ('' deletes all of it)
-- ARGV[5] the call, of a new one; ARGV[6] unix ms at which its run is due, ARGV[7] its timer ('' for never)
-- ARGV[8] kept until unix ms; ARGV[9] accepted unix ms; ARGV[10] channel; ARGV[11] status ('' publishes nothing)
-- ARGV[12] most that a function may have due
--
-- Returns 1; 0 if the state has changed since it was read; -1 if the function has too many due invocations.
if (redis.call('HGET', KEYS[1], 'state') or '') ~= ARGV[3] then
  return 0
end
if ARGV[4] == '' then
  redis.call('DEL', KEYS[1], KEYS[6])
  redis.call('ZREM', KEYS[7], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[5], ARGV[1])
else
  if ARGV[5] ~= '' then
    if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[12]) then
      return -1
    end
    redis.call('HSET', KEYS[1], 'call', ARGV[5])
    redis.call('ZADD', KEYS[5], ARGV[9], ARGV[1])
  end
  redis.call('HSET', KEYS[1], 'state', ARGV[4])
  redis.call('ZADD', KEYS[4], ARGV[8], ARGV[1])
  if ARGV[6] == '' then
    redis.call('ZREM', KEYS[2], ARGV[1])
  else
    redis.call('ZADD', KEYS[2], ARGV[6], ARGV[1])
  end
  if ARGV[7] == '' then
    redis.call('ZREM', KEYS[7], ARGV[1])
  else
    redis.call('ZADD', KEYS[7], ARGV[7], ARGV[1])
  end
end
if redis.call('EXISTS', KEYS[2]) == 1 then
  redis.call('SADD', KEYS[3], ARGV[2])
else
  redis.call('SREM', KEYS[3], ARGV[2])
end
if ARGV[11] ~= '' then
  redis.call('PUBLISH', ARGV[10], ARGV[11] .. ' ' .. ARGV[1])
end
return 1
