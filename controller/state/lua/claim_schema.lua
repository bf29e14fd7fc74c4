-- Keep the later of two schemas of the records.
--
-- KEYS[1] fs:schema
-- ARGV[1] number of the caller's schema, ARGV[2] its record
--
-- Returns the record that holds.
local known = redis.call("GET", KEYS[1])
if known and cjson.decode(known).schema >= tonumber(ARGV[1]) then
  return known
end
redis.call("SET", KEYS[1], ARGV[2])
return ARGV[2]
