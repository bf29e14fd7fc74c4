-- Acquire, renew or release the scheduler's leader lease.
--
-- KEYS[1] fs:leader  string, expiring: id of the gateway that schedules
-- KEYS[2] fs:fence   fencing token: one more at each change of scheduler
-- ARGV[1] own id, ARGV[2] lease in ms (0 gives the lease up), ARGV[3] fence held so far (0: none)
--
-- Returns {fence, leader}: fence is 0 if another controller leads.
local leader = redis.call('GET', KEYS[1])
if ARGV[2] == '0' then
  if leader == ARGV[1] then
    redis.call('DEL', KEYS[1])
  end
  return {0, ''}
end
if leader and leader ~= ARGV[1] then
  return {0, leader}
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
local fence = redis.call('GET', KEYS[2])
if leader and fence == ARGV[3] then
  return {tonumber(fence), ARGV[1]}
end
return {redis.call('INCR', KEYS[2]), ARGV[1]}
