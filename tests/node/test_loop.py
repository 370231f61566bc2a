"""A part that fails: the others go on, one line in the log, and no loop that never sleeps."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from ec_p2p.node.loop import Loop, Part
from ec_p2p.node.pacing import TICK_S


class Errors:
    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


class Flaw:
    """Work of a part, which raises while `error` is set. `calls` has what it was called with."""

    def __init__(self, error=None):
        self.error = error
        self.calls = []

    def __call__(self, *what):
        self.calls.extend(what or [None])
        if self.error is not None:
            raise self.error
        return ()


@pytest.fixture
def errors():
    return Errors()


@pytest.fixture
def quiet():
    """A part that listens, and never hears anything: a node always has some."""
    fd = os.eventfd(0, os.EFD_CLOEXEC)
    yield Part("quiet", lambda: [fd])
    os.close(fd)


@pytest.fixture
def bell():
    """A descriptor that is readable."""
    fd = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def run(loop, ticks, condition=lambda: False):
    """Turn until a part with a tick of its own has been called so often; returns the turns."""
    turns = 0
    while len(ticks.calls) < 3 and not condition():
        loop.turn()
        turns += 1
    return turns


def lines(caplog):
    return [record for record in caplog.records if record.name == "ec_p2p.node.loop"]


@pytest.mark.parametrize("which", ["tick", "turn", "deadlines"])
def test_a_part_that_fails_every_time_is_left_alone_for_a_tick(errors, quiet, caplog, which):
    flaw, sound = Flaw(RuntimeError("a defect")), Flaw()
    # Its deadline has passed and passes again: without the rest there would be no sleep.
    part = Part("flawed", **{"deadlines": lambda: [0.0], which: flaw})
    loop = Loop([quiet, part, Part("sound", tick=sound)], errors)
    turns = run(loop, sound)
    assert errors.count == len(flaw.calls)
    assert 1 <= len(flaw.calls) <= 1 + len(sound.calls)
    assert turns < 100
    [line] = lines(caplog)
    assert line.exc_info[0] is RuntimeError
    assert "flawed" in line.message


def test_a_part_that_has_rested_works_again(errors, quiet):
    flaw, sound = Flaw(RuntimeError("a defect")), Flaw()
    loop = Loop([quiet, Part("flawed", tick=flaw), Part("sound", tick=sound)], errors)
    loop.turn()
    flaw.error = None
    run(loop, sound)
    assert errors.count == 1
    assert len(flaw.calls) >= 2


def test_what_cannot_be_heard_is_left_alone_for_a_tick(errors, quiet, caplog, bell):
    """It stays readable when the error came before it was read."""
    other = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    heard = []
    try:
        flaw, sound = Flaw(ValueError("junk")), Flaw()
        part = Part("flawed", lambda: [bell, other], lambda fd: flaw(fd) if fd == bell else heard.append(fd))
        loop = Loop([quiet, part, Part("sound", tick=sound)], errors)
        run(loop, sound, lambda: len(heard) > 100 * len(flaw.calls))
        assert errors.count == len(flaw.calls) <= 1 + len(sound.calls)
        assert heard[:1] == [other], "what another client says is heard meanwhile"
        assert len(lines(caplog)) == 1
        flaw.error = None
        before = len(flaw.calls)
        run(loop, Flaw(), lambda: len(flaw.calls) > before)
    finally:
        os.close(other)


def test_errors_of_two_kinds_are_logged_once_each(errors, quiet, caplog):
    flaw, sound = Flaw(RuntimeError("one")), Flaw()
    loop = Loop([quiet, Part("flawed", tick=flaw), Part("sound", tick=sound)], errors)
    loop.turn()
    flaw.error = KeyError("two")
    run(loop, sound)
    assert errors.count >= 2
    assert [line.exc_info[0] for line in lines(caplog)] == [RuntimeError, KeyError]


def test_a_descriptor_that_was_closed_does_not_end_the_loop(errors, quiet, bell):
    """A part that forgets to say that it listens to something else."""
    gone = os.eventfd(0, os.EFD_CLOEXEC)
    targets = [gone]
    sound = Flaw()
    heard = []
    loop = Loop([quiet, Part("part", lambda: targets, heard.append), Part("sound", tick=sound)], errors)
    loop.turn()
    os.close(gone)
    targets[:] = [bell]
    run(loop, sound, lambda: bell in heard)
    assert bell in heard


def test_a_poll_that_fails_does_not_end_the_loop(errors, quiet, caplog):
    targets = ["no descriptor"]
    sound = Flaw()
    loop = Loop([quiet, Part("part", lambda: targets), Part("sound", tick=sound)], errors)
    for _ in range(3):
        loop.turn()
    assert errors.count == 3
    assert len(lines(caplog)) == 1
    targets.clear()
    run(loop, sound)
    assert errors.count == 3


def test_nothing_heard_and_nothing_due_is_no_turn(errors, quiet):
    """What follows from what was heard is done in the same turn, and a tick comes no sooner than it is due."""
    ticks, turns = Flaw(), Flaw()
    loop = Loop([quiet, Part("part", tick=ticks, turn=turns)], errors)
    run(loop, ticks)
    assert len(turns.calls) < 100
    assert all(later - earlier > 0.99 * TICK_S for earlier, later in pairwise(ticks.calls))
