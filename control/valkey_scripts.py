"""What a Valkey or Redis server keeps for the nodes, and the Lua scripts that alone change it.

Owns the names of the keys and every rule by which they change. Each change is one script, so that a node's entries and
the log of changes are never seen apart, and so that what came too late changes nothing. Pure text: nothing here talks.

    {prefix}:about     hash: version, epoch, run (the server's life in which the epoch began), seq (number of the last
                       change), bytes (length of the log, with all that was cut off), checked (ms: last look at leases)
    {prefix}:leases    sorted set: incarnation -> ms, by the server's clock, at which its lease ends
    {prefix}:places    hash: place (name and address) -> incarnation of the node that is there
    {prefix}:n:<inc>   hash, one per incarnation: session, seq, place, info (NodeInfo), instances, and under each
                       identity its advert
    {prefix}:events    stream: the log of changes. Each entry has the epoch and one event (NodeUp, NodeDown, Changed).
                       Its id is <bytes>-<seq>: so the log is cut by its length, and a gap shows

The braces are part of the keys: in a cluster, they keep all of a fleet's on one server.

| what happens | what a script does |
|---|---|
| somebody looks: no epoch; or for the first time: it began in another life | everything goes, a new one begins |
| hello | what was known of that incarnation, and of another one at its place, goes; lease, session and `up` |
| announce with that session and the next seq | adverts in or out, `changed` |
| announce that was applied already | nothing |
| announce or heartbeat with another session or seq, or of an unknown node | nothing; it has to say hello again |
| heartbeat | the lease is renewed |
| goodbye, or a lease found to be over | everything of that node goes, `down` |
| nobody has looked at leases for half of a node's timeout: the server, or everybody, was paused | all are renewed |
| nobody at all is there any more | every key goes by itself after a minute or more |
"""

from __future__ import annotations

LOG_BYTES = 32 << 20
"""Bytes of events that the log keeps, about."""

DOWN = r"\146\164down\196\16"
"""What precedes the incarnation in an encoded NodeDown, as Lua writes it."""

_COMMON = r"""
local about = KEYS[1]
local prefix = string.sub(about, 1, -6)
local leases, places, events = prefix .. 'leases', prefix .. 'places', prefix .. 'events'
local epoch = redis.call('HGET', about, 'epoch')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

-- Lua turns large numbers into text with an exponent.
local function whole(number) return string.format('%.0f', number) end

local function node_of(incarnation) return prefix .. 'n:' .. incarnation end

local function kept_for(timeout) return whole(math.max(10 * timeout, 60000)) end

local function publish(event)
  local seq = redis.call('HINCRBY', about, 'seq', 1)
  local bytes = redis.call('HINCRBY', about, 'bytes', #event + 64)
  redis.call('XADD', events, 'MINID', '~', whole(math.max(0, bytes - LOG_BYTES)), whole(bytes) .. '-' .. whole(seq),
    'epoch', epoch, 'event', event)
end

local function clear(incarnation)
  local node = node_of(incarnation)
  local place = redis.call('HGET', node, 'place')
  if place and redis.call('HGET', places, place) == incarnation then redis.call('HDEL', places, place) end
  redis.call('UNLINK', node)
  redis.call('ZREM', leases, incarnation)
end

local function forget(incarnation)
  clear(incarnation)
  publish('DOWN' .. incarnation)
end

-- A full server refuses what needs memory, unless the script has written already: PEXPIRE, which needs none, comes
-- first, so that leases can be renewed all the same.
local function tend(timeout)
  local since = now - (tonumber(redis.call('HGET', about, 'checked')) or 0)
  if since >= 0 and since < timeout / 16 then return end
  for _, key in ipairs({about, leases, places, events}) do redis.call('PEXPIRE', key, kept_for(timeout)) end
  redis.call('HSET', about, 'checked', whole(now))
  if since < 0 or since > timeout / 2 then
    for _, incarnation in ipairs(redis.call('ZRANGE', leases, 0, -1)) do
      redis.call('ZADD', leases, whole(now + timeout), incarnation)
    end
    return
  end
  for _, incarnation in ipairs(redis.call('ZRANGEBYSCORE', leases, '-inf', whole(now), 'LIMIT', 0, 64)) do
    forget(incarnation)
  end
end
""".replace("LOG_BYTES", str(LOG_BYTES)).replace("DOWN", DOWN)

# version, the server's run id, an epoch to begin if one must, timeout in ms, 1 if the connection is new
# -> version, epoch, seq, bytes
LOOK = (
    _COMMON
    + r"""
local version, run, fresh, timeout, new = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5] == '1'
local other = epoch and redis.call('HGET', about, 'version') ~= version
if other and redis.call('ZCARD', leases) > 0 then return {redis.call('HGET', about, 'version')} end
if not epoch or other or (new and redis.call('HGET', about, 'run') ~= run) then
  for _, incarnation in ipairs(redis.call('ZRANGE', leases, 0, -1)) do redis.call('UNLINK', node_of(incarnation)) end
  redis.call('UNLINK', about, leases, places, events)
  epoch = fresh
  redis.call('HSET', about, 'version', version, 'epoch', epoch, 'run', run, 'seq', 0, 'bytes', 0)
end
tend(timeout)
return {version, epoch, redis.call('HGET', about, 'seq'), redis.call('HGET', about, 'bytes')}
"""
)

# incarnation, session, place, NodeInfo, NodeUp, timeout in ms -> epoch; nil: look first
HELLO = (
    _COMMON
    + r"""
local incarnation, session, place, info, up, timeout = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
if not epoch then return false end
local predecessor = redis.call('HGET', places, place)
if predecessor and predecessor ~= incarnation then forget(predecessor) end
clear(incarnation)
local node = node_of(incarnation)
redis.call('HSET', node, 'session', session, 'seq', 0, 'place', place, 'info', info)
redis.call('PEXPIRE', node, kept_for(timeout))
redis.call('ZADD', leases, whole(now + timeout), incarnation)
redis.call('HSET', places, place, incarnation)
publish(up)
tend(timeout)
return epoch
"""
)

# incarnation, session, seq, Changed, instances or '', identities withdrawn, identities stored, their adverts' lengths
# (2 bytes each), their adverts -> 1; nil. Each of the last four all in a row: thousands of arguments cost more.
ANNOUNCE = (
    _COMMON
    + r"""
local incarnation, session, seq, changed, instances = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local withdrawn, stored, lengths, adverts = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local node = node_of(incarnation)
local known = redis.call('HMGET', node, 'session', 'seq')
local at = tonumber(known[2])
if not epoch or known[1] ~= session or not at or seq > at + 1 then return false end
if seq <= at then return 1 end

local words = {}
local function flush(command)
  if #words > 0 then redis.call(command, node, unpack(words)) end
  words = {}
end
for i = 0, #withdrawn - 1, 32 do
  words[#words + 1] = string.sub(withdrawn, i + 1, i + 32)
  if #words >= 2000 then flush('HDEL') end
end
flush('HDEL')
local from = 1
for i = 0, #lengths / 2 - 1 do
  local high, low = string.byte(lengths, 2 * i + 1, 2 * i + 2)
  local to = from + 256 * high + low
  words[#words + 1] = string.sub(stored, 32 * i + 1, 32 * i + 32)
  words[#words + 1] = string.sub(adverts, from, to - 1)
  if #words >= 2000 then flush('HSET') end
  from = to
end
flush('HSET')
if instances ~= '' then redis.call('HSET', node, 'instances', instances) end
redis.call('HSET', node, 'seq', seq)
publish(changed)
return 1
"""
)

# incarnation, session, seq or '' for any, timeout in ms -> epoch; nil
HEARTBEAT = (
    _COMMON
    + r"""
local incarnation, session, seq, timeout = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local node = node_of(incarnation)
local known = redis.call('HMGET', node, 'session', 'seq')
if not epoch or known[1] ~= session or (seq ~= '' and known[2] ~= seq) then return false end
-- A lease that was lost is not put back in silence: who took a snapshot meanwhile has not got this node in it.
if not redis.call('ZSCORE', leases, incarnation) then return false end
redis.call('PEXPIRE', node, kept_for(timeout))
redis.call('ZADD', leases, whole(now + timeout), incarnation)
tend(timeout)
return epoch
"""
)

# incarnation -> 1
GOODBYE = (
    _COMMON
    + r"""
if epoch and redis.call('EXISTS', node_of(ARGV[1])) == 1 then forget(ARGV[1]) end
return 1
"""
)

# incarnation, cursor, about how many -> next cursor, number of adverts, all of them in a row
PAGE = (
    _COMMON
    + r"""
local page = redis.call('HSCAN', node_of(ARGV[1]), ARGV[2], 'COUNT', ARGV[3])
local adverts, found = {}, page[2]
for i = 1, #found, 2 do
  if #found[i] == 32 then adverts[#adverts + 1] = found[i + 1] end
end
return {page[1], #adverts, table.concat(adverts)}
"""
)
