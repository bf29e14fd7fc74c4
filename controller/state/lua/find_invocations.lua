-- Stored invocations that fit, of a range of ranks, the last accepted first.
--
-- KEYS[1] fs:invocations:index
-- ARGV[1] first rank; ARGV[2] last rank; ARGV[3] prefix of an invocation's key; ARGV[4] most that are returned
-- ARGV[5] status ('' any); ARGV[6] '1': dead letters only; ARGV[7] project ('' any), ARGV[8] that of plain names
-- ARGV[9...] functions of which they are (none: any)
--
-- Records are matched as text, which decodes none: a quote within one of their strings has a backslash before it.
-- Returns the number of invocations that were looked at, then id, call and state of each that fits.
local NAME, PROJECT = '"function":"([^"]*)"', '"function":"([^"]*)%.[^".]*"'
local functions, any = {}, #ARGV < 9
for at = 9, #ARGV do
  functions[ARGV[at]] = true
end
local found, most = {0}, tonumber(ARGV[4])
for _, id in ipairs(redis.call('ZREVRANGE', KEYS[1], ARGV[1], ARGV[2])) do
  if #found > 3 * most then
    break
  end
  found[1] = found[1] + 1
  local call, state = unpack(redis.call('HMGET', ARGV[3] .. id, 'call', 'state'))
  if call and state
    and (any or functions[string.match(call, NAME)])
    and (ARGV[7] == '' or (string.match(call, PROJECT) or ARGV[8]) == ARGV[7])
    and (ARGV[5] == '' or (string.match(state, '"status":"(%a*)"') or 'queued') == ARGV[5])
    and (ARGV[6] ~= '1' or string.find(state, '"dead":true', 1, true))
  then
    found[#found + 1] = id
    found[#found + 1] = call
    found[#found + 1] = state
  end
end
return found
