"""A vLLM engine in miniature, driven at random, beside a node that does whatever nodes do.

What ends a real engine fails here: an item without media that reaches the encoder, a promised load that is absent, an
embedding that is gathered and not there. So does a lease that outlives its requests, and a request that never ends.
"""

from __future__ import annotations

import random

import pytest

from ec_p2p.connector.asking import GRACE_S

from .conftest import WAIT_S, Clock, Harness, ScriptedNode, image, request, step, with_media, without_media

NAMES = "abc"
CACHE_ROWS = 25


class Running:
    def __init__(self, r):
        self.request = r
        self.computed = 0
        self.inputs = set()
        """The occurrences, by index, for which vLLM's cache has a reference."""
        self.end = max(f.mm_position.offset + f.mm_position.length for f in r.mm_features)

    @property
    def references(self):
        return {self.request.mm_features[index].identifier for index in self.inputs}


class Engine:
    def __init__(self, role, seed):
        self.role = role
        self.random = random.Random(seed)
        self.clock = Clock()
        self.node = ScriptedNode(self.clock)
        self.side = Harness(self.node, self.clock, role).side
        self.lives = 0
        self.live = {}
        self.cached = {}  # vLLM's encoder cache manager: identifier -> rows, oldest first
        self.freed = []
        self.worker = {}  # the worker's encoder cache: identifier -> rows
        self.promised, self.encoded = {}, {}
        self.served = self.loaded = self.failed = 0

    # ------------------------------------------------------------ requests

    def arrive(self):
        features, offset = [], 2
        names = self.random.choices(NAMES, k=self.random.randint(1, 3))
        if self.random.random() < 0.2:
            names.append(names[0])  # vLLM may evict it between its occurrences
        for name in names:
            rows = 7 if self.random.random() < 0.05 else 10
            data = self.random.choice([with_media, without_media])
            features.append(image(name, offset, rows, data))
            offset += rows + 1
        r = request(*features, hint=dict.fromkeys(NAMES) if self.random.random() < 0.3 else None)
        self.live[r.request_id] = Running(r)

    def abort(self):
        if self.live:
            self.finish(self.random.choice(list(self.live)))

    def finish(self, request_id):
        running = self.live.pop(request_id, None)
        if running is not None:
            self.side.request_finished(running.request)
        return running is not None

    # ------------------------------------------------------------ vLLM's scheduler

    def schedule(self):
        chunk = self.random.choice([4, 12, 64])
        scheduled = [done for r in list(self.live.values()) if (done := self.schedule_one(r, chunk))]
        self.end_step(len(scheduled))
        for running, start, tokens in scheduled:
            self.gather(running, start, tokens)
            running.computed = start + tokens
            self.free_computed(running)
            if running.computed >= running.end:
                assert self.side.ensure_cache_available(running.request, running.computed)
                self.served += self.finish(running.request.request_id)
        for request_id in self.side.take_unavailable_requests():
            self.failed += self.finish(request_id)
        return len(scheduled)

    def schedule_one(self, running, chunk):
        r, start, tokens = running.request, running.computed, chunk
        if not self.side.ensure_cache_available(r, start):
            return None
        encodes, loads, taken, twice = [], [], {}, []
        for index, feature in enumerate(r.mm_features):
            offset, rows, name = feature.mm_position.offset, feature.mm_position.length, feature.identifier
            if offset + rows <= start or offset >= start + tokens:
                continue
            if taken.get(name, self.cached.get(name, rows)) != rows:
                self.finish(r.request_id)  # vLLM rejects it itself
                return None
            if name in taken:
                twice.append(index)
                continue
            if name in self.cached:
                running.inputs.add(index)
                continue
            if not self.make_room(rows + sum(taken.values())):
                tokens = max(0, offset - start)
                break
            taken[name] = rows
            (loads if self.side.has_cache_item(name) else encodes).append(index)
        if not tokens:
            if not start:
                running.inputs.clear()
            return None
        if self.random.random() < 0.1:  # no KV blocks
            self.preempt(running)
            return None
        for index in encodes:
            assert "pixel_values" in r.mm_features[index].data, "the encoder gets nothing to encode"
        for index in encodes + loads:
            feature = r.mm_features[index]
            self.cached[feature.identifier] = feature.mm_position.length
            running.inputs.add(index)
            (self.encoded if index in encodes else self.promised)[feature.identifier] = feature.mm_position.length
            self.side.update_state_after_alloc(r, index)
        running.inputs.update(twice)
        return running, start, tokens

    def free_computed(self, running):
        r = running.request
        r.num_computed_tokens = running.computed
        for index in list(running.inputs):
            position = r.mm_features[index].mm_position
            if position.offset + position.length <= running.computed:
                running.inputs.discard(index)
                self.side.update_state_after_free(r, index)

    def make_room(self, rows):
        used = {name for running in self.live.values() for name in running.references}
        while sum(self.cached.values()) + rows > CACHE_ROWS:
            victim = next((name for name in self.cached if name not in used), None)
            if victim is None:
                return False
            del self.cached[victim]
            self.freed.append(victim)
        return True

    def end_step(self, tokens):
        freed, self.freed = [name for name in self.freed if name not in self.cached], []
        self.side.listen()
        meta = self.side.end_step(step(tokens, freed))
        for name in freed:
            self.worker.pop(name, None)
        if not tokens:
            assert not meta.loads, "a step without tokens is lost on its way"
            return
        promised, self.promised = self.promised, {}
        encoded, self.encoded = self.encoded, {}
        assert {name for name, _ in meta.loads} == set(promised)
        for name, place in meta.loads:
            assert place.rows == promised[name]
            if place.incarnation == self.node.incarnation:
                assert self.node.leases[place.lease][1] == "dispatched", "loaded without a lease"
                self.node.release(place.lease, 0)
            self.worker[name] = place.rows
            self.loaded += 1
        self.worker.update(encoded)
        assert set(meta.encodes) <= set(encoded)
        for name in set(meta.encodes) | (set(meta.saves_resident) & set(self.worker)):
            if self.node.there and not self.node.frozen:
                self.node.holds[name] = self.worker[name]

    def gather(self, running, start, tokens):
        for feature in running.request.mm_features:
            offset, rows = feature.mm_position.offset, feature.mm_position.length
            if offset < start + tokens and offset + rows > start:
                assert self.worker.get(feature.identifier) == rows, "encoder cache miss"

    def preempt(self, running=None):
        running = running or next((r for r in self.live.values() if r.computed), None)
        if running is not None:
            running.request.num_preemptions += running.computed > 0
            running.computed = 0
            running.inputs.clear()

    def reset_encoder_cache(self):
        # Where no source is left, vLLM's copy is the last one, and nobody can save the request.
        if not self.sources_are_there():
            return
        self.clock.now += 1.0
        self.schedule()
        if not self.sources_are_there():
            return
        for kept in (self.cached, self.worker, self.freed, *(r.inputs for r in self.live.values())):
            kept.clear()
        waiting = [(running, running.computed) for running in self.live.values()]
        self.schedule()
        for running, computed in waiting:
            if running.computed == computed:
                # It still waits for another item, without a copy of those it had: should the node die now, too, they
                # would be gone for good.
                self.preempt(running)

    def sources_are_there(self):
        if not self.node.there or not self.node.readers or self.node.frozen or self.node.inbox:
            return False
        placeholders = {
            (feature.identifier, feature.mm_position.length)
            for running in self.live.values()
            for feature in running.request.mm_features
            if running.computed and "pixel_values" not in feature.data
        }
        out_of_reach = self.node.slow | (self.node.remote if self.role == "ec_producer" else set())
        return placeholders <= {held for held in self.node.holds.items() if held[0] not in out_of_reach}

    # ------------------------------------------------------------ the node

    def node_learns(self):
        name = self.random.choice(NAMES)
        self.node.holds[name] = 7 if self.random.random() < 0.1 else 10
        self.random.choice([self.node.remote.add, self.node.remote.discard])(name)

    def node_evicts(self):
        self.node.holds.pop(self.random.choice(NAMES), None)

    def node_slows(self):
        self.random.choice([self.node.slow.add, self.node.slow.discard])(self.random.choice(NAMES))

    def node_answers(self):
        reason = self.random.choice([None, None, "deadline", "failed", "no_memory", "no_source"])
        self.node.answer_open(self.random.choice(NAMES), reason)

    def node_freezes(self):
        self.node.frozen = self.random.random() < 0.3

    def workers_attach(self):
        self.node.readers = self.random.random() < 0.8

    def node_dies(self):
        self.lives += 1
        life = bytes([self.lives % 256]) * 16
        if self.node.there:
            self.node.die(successor=self.random.choice([life, life, life, None]))
        else:
            self.node.there, self.node.incarnation = True, life

    def time_passes(self):
        self.clock.now += self.random.choice([0.05, 1.0, WAIT_S + GRACE_S])

    # ------------------------------------------------------------ what must hold

    def check(self):
        if not self.live and not self.node.inbox:
            assert self.held_leases() == []
            assert len(self.side._asking._leases) == 0
            assert self.side._records == {}

    def held_leases(self):
        return [lease for lease, (_, state) in self.node.leases.items() if state == "held"]

    def drain(self):
        """Every request ends: served, or failed alone."""
        for _ in range(60):
            if not self.live:
                break
            self.clock.now += WAIT_S + GRACE_S
            if not self.schedule():
                # Requests may wait for room that others hold.
                for running in list(self.live.values())[1:]:
                    self.preempt(running)
        assert not self.live, "a request never ends"
        self.end_step(0)
        self.check()


ORDINARY = [Engine.schedule] * 12 + [Engine.arrive] * 3 + [Engine.node_learns] * 2 + [Engine.node_evicts]
HARSH = [
    *[Engine.abort, Engine.preempt, Engine.reset_encoder_cache, Engine.node_slows, Engine.node_answers],
    *[Engine.node_freezes, Engine.workers_attach, Engine.node_dies, Engine.time_passes],
]


@pytest.mark.parametrize("role", ["ec_producer", "ec_consumer", "ec_both"])
@pytest.mark.parametrize("harshness", [0.0, 0.1, 0.3])
def test_an_engine_lives_through_whatever_happens(role, harshness, caplog):
    caplog.set_level("ERROR")
    served = loaded = failed = 0
    for seed in range(60):
        engine = Engine(role, seed)
        for _ in range(150):
            event = engine.random.choice(HARSH if engine.random.random() < harshness else ORDINARY)
            try:
                event(engine)
                engine.check()
            except Exception as error:
                raise AssertionError(f"{event.__name__} with seed {seed}: {error!r}") from error
        engine.drain()
        served, loaded, failed = served + engine.served, loaded + engine.loaded, failed + engine.failed
    # Otherwise nothing was tested.
    assert min(served, loaded, failed) > 20
