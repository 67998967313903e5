"""Shared parts of the tests of the control plane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime.ray.manager.rollout_manager import RolloutManager
from tests.support.fake_fleet import World, fleet_worlds
from tests.support.rollout_manager import manager_maker


@pytest.fixture
def make_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RolloutManager]:
    """Makes a rollout manager without Ray; keyword arguments replace those of the run."""
    return manager_maker(tmp_path, monkeypatch)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Makes fleets of engines that are what the test says."""
    yield from fleet_worlds(monkeypatch)
