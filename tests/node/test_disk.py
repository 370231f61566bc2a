"""Real nodes with a disk tier: what the arena lost is still there, also for other hosts and for later lives."""

from __future__ import annotations

import errno
import itertools
import os

import pytest
import zmq

from ec_p2p.control.codec import decode, encode
from ec_p2p.control.messages import MAX_STAGED, PROTOCOL_VERSION, EntryState, FromPeer, StageAnswer, StageRequest
from ec_p2p.node.messages import Landed, Missing, NoWindow, OpenWindow, Pending, WantItem, Window
from tests.control.harness import Loop
from tests.engine.disks import Gate, Sick, os_error

from .conftest import PATIENCE_S, until
from .here import NodeHere

A, B, C = (bytes([number]) * 32 for number in (1, 2, 3))
MIB = 1 << 20
SMALL_ARENA = {"max_local_cpu_size": "4MiB", "slab_size": "4MiB"}
_fillers = itertools.count(1000)


def payload(seed, nbytes=MIB):
    return bytes([seed, seed ^ 0xFF]) * (nbytes // 2)


def counted(client, name):
    return client.inspect().counters.get(name, 0)


def evict(client, *identities):
    """Store other entries until these have left the arena."""
    before = counted(client, "disk_writes")
    for number in range(1, 5):
        client.store(next(_fillers).to_bytes(32, "big"), payload(7))
        client.has_written(before + number)


def has_looked_through_the_folder(client):
    """Wait until the node knows what was in the folder when it started: it writes nothing before. What comes later it
    does not see by itself as long as a test takes."""
    client.store(next(_fillers).to_bytes(32, "big"), payload(7, 4 << 10))
    client.has_written(1)


def leave_on_disk_only(client):
    """Have A, with payload(1), on the disk of the client's node and not in its arena."""
    client.store(A, payload(1))
    client.has_written(1)
    evict(client, A)


def files_of(folder):
    return sorted(folder.rglob("*.safetensors"))


def file_of(folder, identity):
    [found] = [path for path in files_of(folder) if identity.hex() in path.name]
    return found


def the_only(answers):
    [answer] = answers
    return answer


def lands(reader, identity):
    """Wait until the entry lands. What the reader was told of it last may be outdated: a fetch that fails is no
    surprise."""

    def landed():
        answer = the_only(reader.want(identity, expect_s=PATIENCE_S))
        return answer if isinstance(answer, Landed) else None

    return until(landed, "the entry to land")


def holder_of_nothing(answers):
    """Whether the item is nowhere. A fetch that fails meanwhile is what tells the holder that its file is bad."""
    answer = the_only(answers)
    assert isinstance(answer, Missing)
    return answer.reason == "no_source"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def loop():
    """For who looks at the directory."""
    loop = Loop()
    yield loop
    loop.close()


def test_what_the_arena_lost_comes_back_from_disk(zmq_fleet, folder):
    client = zmq_fleet.client(zmq_fleet.node("a", local_disk=str(folder), **SMALL_ARENA))
    client.store(A, payload(1))
    client.has_written(1)
    assert the_only(client.want(A)).source == "local"
    client.node.close()
    client = zmq_fleet.client(zmq_fleet.nodes[0])
    evict(client, A)
    answer = the_only(client.want(A, rows=MIB // 128))
    assert (answer.source, answer.rows, answer.dim, answer.dtype) == ("disk", MIB // 128, 64, "bfloat16")
    assert client.bytes_of(answer) == payload(1)
    client.release(answer)
    assert the_only(client.want(A)).source == "local"


def test_a_node_is_warm_after_a_restart(zmq_fleet, folder):
    node = zmq_fleet.node("a", local_disk=str(folder))
    client = zmq_fleet.client(node)
    for number in range(20):
        client.store(bytes([number]) * 32, payload(number, 64 << 10))
    node.process.terminate()  # with most of it still to be written
    node.process.wait(PATIENCE_S)
    assert len(files_of(folder)) == 20
    client = zmq_fleet.client(zmq_fleet.node("a", local_disk=str(folder)))
    for number in range(20):
        answer = the_only(client.want(bytes([number]) * 32))
        assert answer.source == "disk"
        assert client.bytes_of(answer) == payload(number, 64 << 10)


def test_another_host_reads_what_only_the_disk_of_a_restarted_node_holds(fleet, folder):
    # The reader gives up on the first life soon, and is asked again.
    node, other = fleet.node("a", local_disk=str(folder)), fleet.node("b", read_timeout_s=3.0)
    client = fleet.client(node)
    client.store(A, payload(1))
    client.has_written(1)
    node.kill()
    again = fleet.client(fleet.node("a", local_disk=str(folder)))
    reader = fleet.client(other)
    # As long as nobody has told the reader of the first node's end, it tries that one, and fails.
    answer = lands(reader, A)
    assert (answer.source, reader.bytes_of(answer)) == ("remote", payload(1))
    assert counted(again, "stagings{outcome=staged}") == 1
    assert counted(again, "stage_requests{outcome=staged}") == 1


def test_an_evicted_entry_is_advertised_as_on_disk_and_can_be_read(fleet, folder):
    (_, holder), (_, reader) = fleet.connected("a", "b", a={"local_disk": str(folder), **SMALL_ARENA})
    leave_on_disk_only(holder)
    assert counted(holder, "evictions") >= 1
    answer = lands(reader, A)
    assert (answer.source, reader.bytes_of(answer)) == ("remote", payload(1))


def test_many_ask_and_the_disk_is_read_once(zmq_fleet, folder):
    node = zmq_fleet.node("a", local_disk=str(folder), **SMALL_ARENA)
    client = zmq_fleet.client(node)
    leave_on_disk_only(client)
    clients = [zmq_fleet.client(node) for _ in range(5)]
    wants = [
        c.node.want([WantItem(A, 0)] * 2, readers=0, wait_s=PATIENCE_S, expect_s=0, local_only=True) for c in clients
    ]
    for one, want in zip(clients, wants, strict=True):
        for index in range(2):
            answer = one.expect((Landed, Missing), lambda m, i=index, w=want: (m.want, m.index) == (w, i))
            assert isinstance(answer, Landed)
    assert counted(client, "disk_reads{outcome=hit}") == 1


def test_a_shared_folder_is_looked_into_before_an_item_is_called_missing(zmq_fleet, folder):
    (first, writer), (_, reader) = zmq_fleet.connected("a", "b", local_disk=str(folder), node_timeout_s=3.0)
    has_looked_through_the_folder(reader)
    writer.store(A, payload(1))
    writer.has_written(1)
    first.kill()
    until(lambda: reader.inspect().peers == [], "the first node to be gone")
    answer = the_only(reader.want(A))
    assert (answer.source, reader.bytes_of(answer)) == ("disk", payload(1))
    missing = the_only(reader.want(B))
    assert (type(missing), missing.reason) == (Missing, "no_source")


def test_a_shared_folder_is_looked_into_when_every_holder_has_failed(zmq_fleet, folder):
    """A holder that is ill may have left the entry there, and nobody has told this node so. One that is dead may be
    known to be: nothing would be tried with it."""
    others = {
        "local_disk": str(folder),
        "max_local_disk_size": "3MiB",
        "node_timeout_s": 60.0,
        "read_timeout_s": 4.0,
    }
    reader = zmq_fleet.client(zmq_fleet.node("b", **others))
    has_looked_through_the_folder(reader)
    first = zmq_fleet.node("a", **others, embedded_directory=False)
    writer = zmq_fleet.client(first)
    writer.store(A, payload(1))
    writer.has_written(1)
    # Too large for the folder, so it can only come from the holder: who has it knows of A there, too.
    writer.store(B, payload(2, 4 * MIB))
    reader.has_landed(B)
    first.freeze()
    answer = the_only(reader.want(A))
    assert (answer.source, reader.bytes_of(answer)) == ("disk", payload(1))
    tried = [name for name, count in reader.inspect().counters.items() if name.startswith("fetches{") and count]
    assert [name for name in tried if "outcome=landed" not in name], tried


@pytest.mark.parametrize("trouble", ["hangs", "fails"])
def test_what_leaves_the_arena_is_advertised_although_the_disk_cannot_be_read_now(
    zmq_fleet, loop, folder, monkeypatch, trouble
):
    """The file is there all the same, and nothing would tell the fleet of it again once the disk is well."""
    gate = Gate("open", A.hex())
    sick = []

    def before(name, args):
        if trouble == "hangs":
            sick and gate(name, args)
        elif sick and (name, A.hex() in str(args[0])) == ("open", True):
            raise os_error(errno.EIO)

    monkeypatch.setattr("ec_p2p.engine.disk.Files", lambda: Sick(before))
    config = zmq_fleet.config("a", local_disk=str(folder), read_timeout_s=1.0, **SMALL_ARENA)
    with NodeHere(config):
        client = zmq_fleet.client(config)
        leave_on_disk_only(client)
        client.store(B, payload(2))
        client.has_written(6)
        replica = loop.replica(config.directories[0])
        loop.until(lambda: len(replica.lookup(B)) == 1, "the advert")
        sick.append(True)
        assert isinstance(the_only(client.want(A, wait_s=PATIENCE_S)), Missing)
        evict(client, B)
        loop.until(lambda: [found.state for _, found in replica.lookup(B)] == [EntryState.DISK], "the other advert")
        assert [found.state for _, found in replica.lookup(A)] == [EntryState.DISK]
        gate.opened.set()


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete"])
def test_a_harmed_file_is_a_miss_and_the_fleet_is_told(zmq_fleet, folder, harm):
    (_, holder), (_, reader) = zmq_fleet.connected("a", "b", a={"local_disk": str(folder), **SMALL_ARENA})
    leave_on_disk_only(holder)
    path = file_of(folder, A)
    if harm == "flip":
        with path.open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(b"\x55")
    elif harm == "truncate":
        os.truncate(path, path.stat().st_size - 4096)
    else:
        path.unlink()
    until(lambda: holder_of_nothing(reader.want(A)), "the advert to be withdrawn")
    missing = the_only(holder.want(A))
    assert (type(missing), missing.reason) == (Missing, "no_source")
    assert counted(holder, "disk_damaged") == (harm != "delete")
    holder.store(A, payload(1))
    assert the_only(holder.want(A)).source == "local"


def test_what_another_node_of_the_folder_stores_ends_the_waiting_for_it(zmq_fleet, folder):
    (_, writer), (_, reader) = zmq_fleet.connected("a", "b", local_disk=str(folder))
    want = reader.node.want([WantItem(A, 0)], readers=0, wait_s=PATIENCE_S, expect_s=PATIENCE_S, local_only=False)
    assert reader.expect(Pending).why in ("staging", "expected")
    writer.store(A, payload(1))
    assert isinstance(reader.expect(Landed, lambda m: m.want == want), Landed)


def test_stage_requests_of_strangers(zmq_fleet, folder):
    node = zmq_fleet.node("a", local_disk=str(folder), **SMALL_ARENA)
    client = zmq_fleet.client(node)
    leave_on_disk_only(client)
    address = client.inspect().node["address"]
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.rcvtimeo = int(PATIENCE_S * 1000)
        peer.connect(address)
        peer.send(encode(StageRequest(PROTOCOL_VERSION, [B, A, A])))
        answers = [decode(peer.recv(), FromPeer) for _ in range(2)]
        assert StageAnswer(B, None) in answers
        [staged] = [answer for answer in answers if answer.identity == A]
        assert (staged.advert.identity, staged.advert.nbytes, staged.advert.state) == (A, MIB, 1)
        peer.send(encode(StageRequest(PROTOCOL_VERSION + 1, [A])))
        assert "version" in decode(peer.recv(), FromPeer).reason
        peer.send(encode(StageRequest(PROTOCOL_VERSION, [B] * (MAX_STAGED + 1))))
        until(lambda: counted(client, "bad_frames{socket=peer}") == 1, "the frame to be counted")
        peer.send(encode(StageRequest(PROTOCOL_VERSION, [A])))
        assert decode(peer.recv(), FromPeer).advert is not None


def test_a_peer_that_waits_for_the_disk_is_told_when_the_entry_comes_another_way(zmq_fleet, folder):
    """There is no memory to read it into; meanwhile an instance of this host stores it."""
    node = zmq_fleet.node("a", local_disk=str(folder), read_timeout_s=2 * PATIENCE_S, **SMALL_ARENA)
    client = zmq_fleet.client(node)
    leave_on_disk_only(client)
    window = client.window(MIB)
    take_what_is_left(client)
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.rcvtimeo = int(PATIENCE_S * 1000)
        peer.connect(client.inspect().node["address"])
        peer.send(encode(StageRequest(PROTOCOL_VERSION, [A])))
        until(lambda: client.inspect().gauges["stagings_in_flight"] == 1, "the request")
        client.store(A, payload(1), window=window)
        answer = decode(peer.recv(), FromPeer)
        assert (answer.identity, answer.advert.state, answer.advert.offset) == (A, EntryState.RESIDENT, window.offset)
    assert counted(client, "disk_reads{outcome=hit}") == 0
    until(lambda: client.inspect().gauges["stagings_in_flight"] == 0, "the staging to be dropped")


def take_what_is_left(client):
    """Have everything in windows that is not reserved."""
    for nbytes in (MIB, 64 << 10, 4 << 10):
        got = Window
        while got is Window:
            request = client.node.next_id()
            client.node.send(OpenWindow(request, nbytes))
            got = type(client.expect((Window, NoWindow), lambda m, r=request: m.request == r))
