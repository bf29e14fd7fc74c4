-- Remove the entries of a published segment from the stream, and old row ids from the set.
--
-- KEYS[1] fs:ledger:segments  hash: number -> header; as many as there are
-- KEYS[2] fs:ledger           stream
-- KEYS[3] fs:ledger:ids       sorted set: row id -> unix ms
-- KEYS[4] fs:ledger:horizon   unix ms; of rows that began earlier, ids may be in segments only
-- ARGV[1] number of the segment, ARGV[2] its header, ARGV[3] the first entry id after its last
-- ARGV[4] ids with lower scores are forgotten, as all of them are in segments; ARGV[5] the horizon, no lower than that
--
-- Returns 1, or 0 if that segment is known, or the one before it is not: nothing is changed then. The segment is
-- published and immutable, so any controller may call this, any number of times.
if redis.call('HLEN', KEYS[1]) ~= tonumber(ARGV[1]) - 1 then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', '(' .. ARGV[4])
if tonumber(ARGV[5]) > tonumber(redis.call('GET', KEYS[4]) or '0') then
  redis.call('SET', KEYS[4], ARGV[5])
end
return 1
