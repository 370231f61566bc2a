"""What the benchmarks print, in words, for their --help. Here, where nothing of what they measure is imported."""

FETCH = """\
Sizes are of all items of a fetch together; each item has whole rows of 2048 bytes, and at least one. In each round,
one after the other, p50 (p90) of all rounds in microseconds:
  raw READ       one READ of as many bytes between two processes, and nothing else
  node fetch     what the reading node takes: lookup, READ of payload and records, validation, lease
  client want    the same as its client sees it, from the call to the answer
  want to ...    until there is a tensor of each item on the device, with --device
  memcpy         of as many bytes within one process
  fetch/raw      node fetch divided by raw READ, of the p50 figures
"""

ENGINE = """\
Entries have whole rows of 2048 bytes. Each operation in turn with its yardstick, p50 in microseconds:
  put, get       a tensor into and out of an arena that is full; yardstick: a memcpy between the same places
  borrow         a pin on an entry and its end, without a copy; its limit is a time
  disk_write     an entry to a file, with its hash; yardstick: the same with plain file I/O
  disk_read      back from its file, verified, by way of the page cache; yardstick: the same with plain file I/O
  us, limit      what it takes, and what it may take: the last line says how that follows from the yardstick
  ratio          us divided by the yardstick (borrow: by its limit)
  over           the limit is exceeded
"""

DIRECTORY = """\
For so many entries in the directory:
  snapshot s     until a newcomer knows all of them, and the bytes that it is sent
  lookup us      of one entry in a replica, in microseconds
  visible ms     from an advert on one node until a replica of another has it
Below them each gate with its value and its limit.

With --instances, for so many nodes of 100 entries each, and as many subscribers:
  announced s    until the directory knows all entries
  idle cpu %     of the directory with nothing but heartbeats, and in us/heartbeat of each
  load cpu %     with 20 adverts a second, and in us/publish/sub for each publication and subscriber
  rss MiB        memory of the directory; descriptors: its open files
  restart s      of the directory, until it knows everything again; its cpu s: the CPU time that this took it
  followed s     until the replicas have heard everything from it, too
  alone s        as 'restart s', without the subscribers
"""

POLICY = """\
A line for each trace and size of the arena (a share of the catalogue's bytes), a column for each policy, in percent:
  hits           requests whose item was there
  bytes hit      of all bytes that were asked for
  encoder time   of all that the requests would take without a cache
"""
