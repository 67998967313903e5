"""Objects that are loaded are left out of garbage collection; later ones are collected."""

from __future__ import annotations

import gc
import weakref

import pytest

from slime.ray.actors.worker import ALLOCATIONS, NEVER, collect_between_rollouts, gc_freeze

pytestmark = pytest.mark.slow


class Node:
    """Two that know each other are garbage only a collection finds."""

    def __init__(self) -> None:
        self.other: Node | None = None


def pair() -> tuple[Node, weakref.ref[Node]]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return one, weakref.ref(two)


@pytest.fixture
def collector():
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


def test_only_what_comes_later_is_collected(collector):
    garbage, garbage_seen = pair()
    del garbage
    loaded, loaded_seen = pair()
    gc_freeze()
    assert garbage_seen() is None
    assert gc.get_threshold()[0] == ALLOCATIONS
    assert gc.get_threshold()[2] == NEVER
    later, later_seen = pair()
    traversed = len(gc.get_objects())
    assert traversed < gc.get_freeze_count() / 10
    del loaded, later
    collect_between_rollouts()
    assert later_seen() is None
    assert loaded_seen() is not None


def test_what_lives_long_is_not_traversed_again_and_again(collector):
    """The collector would traverse every list of a large rollout: seconds in which nothing else runs."""
    gc_freeze()
    seen: list[int] = []
    gc.callbacks.append(lambda phase, info: seen.append(info["generation"]))
    try:
        held = [[number] for number in range(30 * ALLOCATIONS)]
    finally:
        gc.callbacks.pop()
    assert len(held) == 30 * ALLOCATIONS
    assert set(seen) == {0, 1}


def test_other_processes_collect_as_ever(monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    collect_between_rollouts()
