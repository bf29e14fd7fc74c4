-- Read what there is of several nodes with one command.
--
-- KEYS: of each node its lease, its orders, its statuses, its copies
--
-- Returns for each node the lease or nil, then the three hashes as lists of fields and values.
local found = {}
for at = 1, #KEYS, 4 do
  found[at] = redis.call("GET", KEYS[at])
  for hash = at + 1, at + 3 do
    found[hash] = redis.call("HGETALL", KEYS[hash])
  end
end
return found
