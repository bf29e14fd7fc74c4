-- Append a budget event to the stream of alerts, once.
--
-- KEYS[1] fs:alerted:{what}  string, expiring: the event is written
-- KEYS[2] fs:alerts          stream
-- ARGV[1] event (JSON), ARGV[2] how long to remember it in s, ARGV[3] events kept, about
--
-- Returns 1 if it was new.
if not redis.call('SET', KEYS[1], '1', 'NX', 'EX', ARGV[2]) then
  return 0
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'event', ARGV[1])
return 1
