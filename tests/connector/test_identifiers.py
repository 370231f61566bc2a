"""Whether an instance shares at all is decided by its configuration, once, and said aloud."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ec_p2p.connector.counts import Counts
from ec_p2p.connector.identifiers import sharing_of
from ec_p2p.connector.media import Carries, MediaFields
from ec_p2p.connector.no_sharing import NoSharing

from .conftest import ROLES, image, item_of, request, step, torch, with_media, without_media


def config(cache_gb=4.0, prefix=True, encoder_decoder=False, multimodal=True, tp=1, local=1):
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_encoder_decoder=encoder_decoder,
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb) if multimodal else None,
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, prefill_context_parallel_size=1, local_world_size=local
        ),
    )


@pytest.mark.parametrize(
    ("cache_gb", "prefix", "shared"), [(4, True, True), (4, False, True), (0, True, True), (0, False, False)]
)
def test_names_that_only_this_process_understands_are_not_shared(cache_gb, prefix, shared):
    sharing = sharing_of(config(cache_gb=cache_gb, prefix=prefix))
    assert sharing.on is shared
    assert shared or "counter" in sharing.why
    assert not sharing.expected


def test_models_without_an_encoder_cache():
    for settings in ({"encoder_decoder": True}, {"multimodal": False}):
        sharing = sharing_of(config(**settings))
        assert (sharing.on, sharing.expected) == (False, True)


def test_ranks_on_several_hosts():
    assert sharing_of(config(tp=8, local=8)).on
    assert not sharing_of(config(tp=16, local=8)).on


def test_what_an_item_carries():
    fields = MediaFields(ROLES)
    none = item_of(pixel_values=None, image_grid_thw=torch.ones(3))
    cases = [
        (image("a"), Carries.MEDIA),
        (image("a", data=without_media), Carries.NOTHING),
        (image("a", data=None), Carries.NOTHING),
        (image("a", data=lambda: item_of()), Carries.NOTHING),
        (image("a", data=lambda: none), Carries.NOTHING),
        (image("a", data=lambda: item_of(image_embeds=torch.ones(1))), Carries.EMBEDDING),
        (image("a", data=lambda: item_of(image_embeds=torch.ones(1), pixel_values=torch.ones(1))), Carries.MEDIA),
        (image("a", data=lambda: item_of(address="in shared memory")), Carries.MEDIA),
    ]
    for feature, carries in cases:
        assert fields.carried_by(feature) is carries
    # A model that declares no such fields: whatever is there is media.
    assert MediaFields({}).carried_by(image("a", data=without_media)) is Carries.MEDIA
    assert fields.fields_for("image") == {"image_grid_thw"}
    assert fields.fields_for("audio") == set()


def test_an_instance_that_shares_nothing_encodes_all_and_fails_what_it_cannot_encode():
    counts = Counts()
    side = NoSharing(counts, MediaFields(ROLES))
    r, without = request(image("a", data=with_media)), request("b", image("a", 10, data=without_media))
    assert side.ensure_cache_available(r, 0)
    assert not side.has_cache_item("a")
    side.update_state_after_alloc(r, 0)
    for _ in range(3):
        assert not side.ensure_cache_available(without, 0)
    assert side.take_unavailable_requests() == {without.request_id}
    assert side.take_unavailable_requests() == set()
    assert side.ensure_cache_available(without, 20)
    side.request_finished(without)
    assert side.end_step(step()).loads == []
    assert counts.take() == {"local_encodes": {"not_shared": 1}, "failed_requests": {"not_shared": 1}}


def test_encoder_decoder_models_are_left_alone():
    side = NoSharing(Counts(), None)
    assert side.ensure_cache_available(request(image("a", data=None)), 0)
    assert not side.has_cache_item("a")
