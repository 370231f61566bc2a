"""Requests as vLLM makes them, and a client of a scripted node for what a real node does not do on demand."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from ec_p2p.config import make_config
from ec_p2p.connector.counts import Counts
from ec_p2p.connector.media import MediaFields
from ec_p2p.connector.scheduler import SchedulerSide
from ec_p2p.identity import entry_identity
from ec_p2p.node.client import Detached
from ec_p2p.node.messages import Landed, Missing, Pending

OLD, NEW = b"o" * 16, b"n" * 16
ROLES = {"image": {"image_embeds": "values", "image_grid_thw": "metadata"}}
WAIT_S = 5.0
_numbers = itertools.count(1)


def identity_of(identifier):
    return entry_identity("namespace", identifier)


def item_of(**fields):
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=value, field=MultiModalBatchedField()) for name, value in fields.items()}
    )


def with_media():
    return item_of(pixel_values=torch.zeros(4), image_grid_thw=torch.tensor([1, 2, 2]))


def without_media():
    return item_of(image_grid_thw=torch.tensor([1, 2, 2]))


def image(identifier, offset=0, rows=10, data=with_media):
    return MultiModalFeatureSpec(
        data=data() if data else None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=rows),
        mm_hash=identifier,
    )


def request(*features, hint=None, request_id=None):
    """A real vLLM request; images given as identifiers are laid out one after another."""
    placed, offset = [], 0
    for feature in features:
        if isinstance(feature, str):
            feature = image(feature, offset)
        placed.append(feature)
        offset = feature.mm_position.offset + feature.mm_position.length
    params = SamplingParams(max_tokens=8)
    if hint is not None:
        params.extra_args = {"ec_transfer_params": hint}
    return Request(
        request_id=request_id or f"r{next(_numbers)}",
        prompt_token_ids=list(range(offset + 5)),
        sampling_params=params,
        pooling_params=None,
        mm_features=placed,
    )


def step(tokens=1, freed=()):
    """The part of vLLM's SchedulerOutput that the connector looks at."""
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens, free_encoder_mm_hashes=list(freed), finished_req_ids=set()
    )


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class ScriptedNode:
    """NodeClient's place for a test. It answers wants by what it `holds`, unless it is told otherwise."""

    def __init__(self, clock):
        self.clock = clock
        self.incarnation = OLD
        self.node_name = "host1"
        self.there = True
        self.frozen = False
        self.readers = True
        self.holds = {}
        """identifier -> rows"""
        self.remote = set()
        self.read = 0
        """What has landed has done so in the arena, or by the READ of this number."""
        self.slow = set()
        """Identifiers that are answered by Pending, and later by `land`."""
        self.sent = []
        self.inbox = []
        self.wants = {}
        self.pending = {}
        self.leases = {}
        self.closed = 0
        self._ids = itertools.count(1)
        self._lease_ids = itertools.count(1)

    # the client's interface

    def attach(self, timeout_s=0.0):
        return self.there

    def want(self, items, *, readers, wait_s, expect_s, local_only=False, landing):
        if not self.there:
            return 0
        number = next(self._ids)
        self.wants[number] = list(items)
        self.sent.append(
            (
                "want",
                number,
                [i.identity for i in items],
                {"expect_s": expect_s, "local_only": local_only, "landing": landing},
            )
        )
        if not self.frozen:
            for index, item in enumerate(items):
                self._answer(number, index, item, local_only)
        return number

    def forget(self, want):
        self.sent.append(("forget", want))
        self.pending = {key: identity for key, identity in self.pending.items() if key[0] != want}
        for lease in [n for n, (of, _) in self.leases.items() if of == want]:
            if self.leases[lease][1] == "held":
                del self.leases[lease]

    def dispatched(self, lease):
        assert self.leases[lease][1] == "held", "dispatched twice, or never leased"
        self.leases[lease] = (self.leases[lease][0], "dispatched")

    def release(self, lease, reader=-1):
        self.sent.append(("release", lease, reader))
        assert lease in self.leases, "released twice, or never leased"
        assert reader >= 0 or self.leases[lease][1] == "held", "dropped while the workers copy"
        del self.leases[lease]

    def encoding(self, identities):
        self.sent.append(("encoding", list(identities)))

    def poll(self, timeout_s=0.0):
        if not self.inbox:
            self.clock.now += timeout_s
        heard, self.inbox = self.inbox, []
        return heard

    def close(self):
        self.closed += 1

    # the script

    def _answer(self, number, index, item, local_only):
        found = (i for i in self.holds if identity_of(i) == item.identity and not (local_only and i in self.remote))
        identifier = next(found, None)
        if not self.readers:
            self.inbox.append(Missing(number, index, "no_readers"))
        elif any(identity_of(slow) == item.identity for slow in self.slow):
            self.inbox.append(Pending(number, index, "fetching"))
            self.pending[number, index] = item.identity
        elif identifier is None:
            self.inbox.append(Missing(number, index, "no_source"))
        elif item.rows not in (0, self.holds[identifier]):
            self.inbox.append(Missing(number, index, "rows"))
        else:
            self._land(number, index, "remote" if identifier in self.remote else "local", self.holds[identifier])

    def _land(self, number, index, source, rows):
        lease = next(self._lease_ids)
        self.leases[lease] = (number, "held")
        place = (4096 * lease, rows * 8, rows, 4, "bfloat16")
        self.inbox.append(Landed(number, index, lease, *place, source, 0.002, self.read))

    def _asked(self, identifier):
        found = [
            (number, index, item)
            for number, items in self.wants.items()
            for index, item in enumerate(items)
            if item.identity == identity_of(identifier)
        ]
        return found[-1]

    def land(self, identifier, source="remote"):
        number, index, item = self._asked(identifier)
        self._land(number, index, source, item.rows)

    def miss(self, identifier, reason):
        number, index, _ = self._asked(identifier)
        self.inbox.append(Missing(number, index, reason))

    def answer_open(self, identifier, reason=None):
        """Answer whatever was answered by Pending so far: by landing, or by Missing for `reason`."""
        for number, index in [key for key in self.pending if self.pending[key] == identity_of(identifier)]:
            del self.pending[number, index]
            if reason:
                self.inbox.append(Missing(number, index, reason))
            else:
                self._land(number, index, "remote", self.wants[number][index].rows)

    def die(self, successor=None):
        """The node is gone; `successor` is the incarnation that is there at once, or None for nobody."""
        self.inbox.append(Detached(self.incarnation))
        self.leases.clear()
        self.pending.clear()
        self.holds.clear()
        self.there = successor is not None
        self.incarnation = successor or b""

    def told(self, kind):
        return [message[1:] for message in self.sent if message[0] == kind]

    @property
    def asked(self):
        """How often each identity has been wanted."""
        return [identity for _, identities, _ in self.told("want") for identity in identities]


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def node(clock):
    return ScriptedNode(clock)


class Harness:
    """A scheduler's side and vLLM's part in calling it, as vLLM orders the calls."""

    def __init__(self, node, clock, role, **settings):
        self.counts = Counts()
        self.node = node
        self.side = SchedulerSide(
            node,
            make_config({"fetch_timeout_s": WAIT_S, **settings}),
            self.counts,
            MediaFields(ROLES),
            identity_of,
            saves=role != "ec_consumer",
            fetches=role != "ec_producer",
            readers=1,
            clock=clock,
        )
        self.cache = set()
        """vLLM's encoder cache."""

    def ensure(self, request, computed=0):
        return self.side.ensure_cache_available(request, computed)

    def schedule(self, request, computed=0, tokens=1):
        """One pass of vLLM's scheduler over one request. The identifiers to load, or None if it has to wait."""
        if not self.ensure(request, computed):
            self.end(tokens=0)
            return None
        loads, encodes = [], []
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= computed or feature.identifier in self.cache:
                continue
            self.cache.add(feature.identifier)
            (loads if self.side.has_cache_item(feature.identifier) else encodes).append(index)
        for index in encodes + loads:
            self.side.update_state_after_alloc(request, index)
        return self.end(tokens)

    def end(self, tokens=1, freed=()):
        self.side.listen()
        self.cache.difference_update(freed)
        return self.side.end_step(step(tokens, freed))

    def counted(self):
        return self.counts.take()


@pytest.fixture
def harness(node, clock):
    def make(role="ec_consumer", **settings):
        return Harness(node, clock, role, **settings)

    return make


def loaded(metadata):
    return [identifier for identifier, _ in metadata.loads]
