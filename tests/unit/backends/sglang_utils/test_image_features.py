"""The cache of image features: emptied when the tower has changed, and only then."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests.support.engine_plugin import engine_plugin


@pytest.fixture
def features() -> Iterator[ModuleType]:
    """The plugin's module, over an SGLang of a few names."""
    with engine_plugin(
        {"managers.mm_utils": {"tensor_hash": lambda tensor: hash(tuple(tensor.flatten().tolist()))}}
    ) as load:
        yield load("weights.features")


class Cache:
    def __init__(self) -> None:
        self.cleared = 0

    def clear(self) -> None:
        self.cleared += 1


def model(tower: str) -> nn.Module:
    """A language model and, unless the name is empty, a tower of that name."""
    made = nn.Module()
    for name in ("model", "lm_head", *([tower] if tower else [])):
        owner = made
        for part in name.split(".")[:-1]:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.add_module(name.rpartition(".")[2], nn.Linear(2, 2))
    return made


@pytest.mark.parametrize("tower", ["visual", "vision_tower", "model.visual"])
def test_features_are_forgotten_once_per_change_of_the_tower(features, tower):
    cache, served = Cache(), model(tower)
    updater = SimpleNamespace(get_model=lambda: served)
    features.forget_old(cache)
    assert cache.cleared == 0  # nothing has arrived
    features.note_update(updater)
    features.forget_old(cache)
    assert cache.cleared == 1  # what it was before is not known
    for touched, expected in (("lm_head", 1), (tower, 2), ("lm_head", 2)):
        with torch.no_grad():
            served.get_submodule(touched).weight.add_(1)
        for _ in range(2):  # buckets of one push
            features.note_update(updater)
        features.forget_old(cache)
        features.forget_old(cache)
        assert cache.cleared == expected, touched


def test_without_a_part_that_is_known_every_change_counts(features):
    cache, served = Cache(), model("")
    updater = SimpleNamespace(get_model=lambda: served)
    for expected in (1, 2):
        with torch.no_grad():
            served.get_submodule("lm_head").weight.add_(1)
        features.note_update(updater)
        features.forget_old(cache)
        assert cache.cleared == expected
