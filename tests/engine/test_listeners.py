"""What the tiers tell, and when: the one way by which a node hears of changes that it did not make."""

from __future__ import annotations

from pathlib import Path

from ec_p2p.engine.storage import StorageManager

A = b"\x01" * 32
MIB = 1 << 20


def store(storage: StorageManager, identity: bytes) -> None:
    extent = storage.cpu.reserve(128)
    storage.cpu.publish(extent, identity, 128, 1, 64, "bfloat16")


def test_an_entry_is_unpinned_when_its_last_pin_closes_and_not_before() -> None:
    heard: list[bytes] = []
    with StorageManager(MIB, slab_size=MIB, on_unpinned=lambda entry: heard.append(entry.identity)) as storage:
        store(storage, A)
        first, second = storage.cpu.borrow(A), storage.cpu.borrow(A)
        assert first is not None
        assert second is not None
        first.close()
        first.close()
        assert heard == []
        storage.cpu.remove(A)
        second.close()
        assert heard == [A]
        assert storage.cpu.used_bytes == 0


def test_what_was_written_is_filed_before_it_is_unpinned(tmp_path: Path) -> None:
    heard: list[str] = []
    with StorageManager(
        MIB,
        slab_size=MIB,
        local_disk=str(tmp_path),
        on_stored=lambda entry: heard.append("stored"),
        on_filed=lambda filed: heard.append("filed"),
        on_unpinned=lambda entry: heard.append("unpinned"),
    ) as storage:
        store(storage, A)
        assert storage.flush()
    assert heard == ["stored", "filed", "unpinned"]
