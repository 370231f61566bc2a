"""Random lives: nodes store, withdraw, leave and come back, while all that can happen to a Valkey or Redis server
happens to it. Whatever that was, everybody agrees soon afterwards, and with the nodes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ec_p2p.control.messages import InstanceInfo
from tests.control.harness import Loop, advert, node
from tests.control.valkey_process import ValkeyProcess, needs_server

pytestmark = needs_server

_KEYS = ("about", "leases", "places", "events")


class Life:
    """Three nodes, two replicas, one server, and what each node holds."""

    def __init__(self, loop: Loop, server: ValkeyProcess, seed: int) -> None:
        self.random = random.Random(seed)
        self.loop, self.server = loop, server
        self.lives = dict.fromkeys((1, 2, 3), 0)
        self.held: dict[int, dict[bytes, Any]] = {number: {} for number in self.lives}
        self.instances: dict[int, list[InstanceInfo]] = {number: [] for number in self.lives}
        self.announcers = {number: loop.announcer(server.endpoint, node(number)) for number in self.lives}
        self.replicas = [loop.replica(server.endpoint) for _ in range(2)]
        self.troubles: tuple[Callable[[], None], ...] = (
            self.flush,
            self.lose_a_key,
            self.cut_connections,
            self.restart,
            self.restart_with_old_data,
            self.freeze,
            self.fill,
            self.skip_numbers,
            self.kill_a_node,
        )

    def work(self, changes: int) -> None:
        for _ in range(changes):
            number = self.random.choice(list(self.lives))
            entry = advert(self.random.randrange(50), generation=self.random.randrange(1, 1_000_000))
            if self.random.random() < 0.6:
                self.held[number][entry.identity] = entry
                self.announcers[number].store(entry)
            else:
                self.held[number].pop(entry.identity, None)
                self.announcers[number].withdraw(entry.identity)
            if self.random.random() < 0.05:
                self.instances[number] = [InstanceInfo(f"engine-{entry.generation}", "both", "")]
                self.announcers[number].describe(self.instances[number])
            if self.random.random() < 0.2:
                self.loop.turn(0)

    def agreed(self) -> bool:
        """Every replica, and one that comes only now, knows what the nodes hold and nothing else."""
        whole = {node(number, life=life).incarnation: number for number, life in self.lives.items()}
        for replica in self.replicas:
            if not replica.fresh or {info.incarnation for info in replica.nodes()} != whole.keys():
                return False
            for incarnation, number in whole.items():
                said = {entry.identity: entry for entry in replica.held_by(incarnation)}
                if said != self.held[number] or replica.instances(incarnation) != self.instances[number]:
                    return False
        return all(announcer.connected and not announcer.pending for announcer in self.announcers.values())

    # ---------------------------------------------------------------- what happens

    def flush(self) -> None:
        with self.server.client() as client:
            client.flushall()

    def lose_a_key(self) -> None:
        with self.server.client() as client:
            nodes = [key.decode("latin-1") for key in client.keys(self.server.key("n:*"))]
            name = self.random.choice([*map(self.server.key, _KEYS), *nodes])
            client.delete(name.encode("latin-1"))

    def cut_connections(self) -> None:
        with self.server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def restart(self) -> None:
        self.server.kill()
        self.work(20)
        (self.server.folder / "dump.rdb").unlink(missing_ok=True)
        self.server.start()

    def restart_with_old_data(self) -> None:
        with self.server.client() as client:
            client.save()
        self.work(40)
        for _ in range(self.random.randrange(10)):
            self.loop.turn()
        self.server.kill()
        self.server.start()

    def freeze(self) -> None:
        self.server.freeze()
        for _ in range(self.random.randrange(5, 100)):
            self.work(2)
            self.loop.turn()
        self.server.thaw()

    def fill(self) -> None:
        with self.server.client() as client:
            client.config_set("maxmemory", 1)
            self.work(20)
            for _ in range(self.random.randrange(60)):
                self.loop.turn()
            client.config_set("maxmemory", 0)

    def skip_numbers(self) -> None:
        with self.server.client() as client:
            client.hincrby(self.server.key("about"), "seq", self.random.randrange(1, 100))

    def kill_a_node(self) -> None:
        number = self.random.choice(list(self.lives))
        self.loop.forget(self.announcers[number])
        self.lives[number] += 1
        self.held[number], self.instances[number] = {}, []
        reborn = node(number, life=self.lives[number])
        self.announcers[number] = self.loop.announcer(self.server.endpoint, reborn)


@pytest.mark.parametrize("seed", range(3))
def test_everybody_agrees_whatever_happens(loop: Loop, server: ValkeyProcess, seed: int) -> None:
    life = Life(loop, server, seed)
    for _ in range(5):
        life.work(60)
        trouble = life.random.choice(life.troubles)
        trouble()
        life.work(20)
        loop.until(life.agreed, f"after {trouble.__name__}")
    life.replicas.append(loop.replica(server.endpoint))
    loop.until(life.agreed, "for one that comes late")
