-- Acquire, renew or release the scheduler's leader lease.
--
-- KEYS[1] fs:leader  string, expiring: id of the gateway that schedules
-- KEYS[2] fs:fence   fencing token: a greater one at each change of scheduler
-- ARGV[1] own id, ARGV[2] lease in ms (0 gives the lease up), ARGV[3] fence held so far (0: none)
-- ARGV[4] the greatest fence that this controller has held, ARGV[5] a random number below 1000
--
-- A Redis that lost its last writes (a replica that was promoted, a crash) may have an old fence. The next one is above
-- it, above all that the taker held, and above the server's clock in us, of whole ms, which is above any fence that was
-- given a ms earlier: the random number, which keeps two takers apart whose servers' clocks differ, is less than that.
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
local now = redis.call('TIME')
local now_us = (tonumber(now[1]) * 1000 + math.floor(tonumber(now[2]) / 1000)) * 1000
local greatest = math.max(tonumber(fence or '0'), tonumber(ARGV[4]), now_us)
local new = string.format('%.0f', greatest + 1 + tonumber(ARGV[5]))
redis.call('SET', KEYS[2], new)
return {tonumber(new), ARGV[1]}
