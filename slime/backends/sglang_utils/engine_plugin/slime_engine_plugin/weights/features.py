"""Forget the features of images when the tower that made them has changed.

SGLang keeps features by the hash of their image, and no flush empties that cache: after a push that changes the tower,
an image that was seen before would still get the old tower's features. After weights have arrived, by whatever
transport, the next request with an image compares the tower with what it was; features of a tower that is frozen are
kept.
"""

from __future__ import annotations

import re
import weakref
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.mem_cache.multimodal_cache import MultiModalStaticCache
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

_LANGUAGE_MODEL = re.compile(r"(model|language_model)\.(?!visual|vision)|lm_head\.")
_updated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models that have got weights since they were compared last."""
_towers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""The hash of their tower at that time."""


def note_update(updater: WeightUpdater, *args: object, **kwargs: object) -> None:
    """Before an update of weights."""
    _updated.add(updater.get_model())


def forget_old(cache: MultiModalStaticCache, *args: object, **kwargs: object) -> None:
    """Before features are looked up: empty the cache, unless every tower is as it was."""
    while _updated:
        model = _updated.pop()
        found = hash_of_tower(model)
        if found != _towers.get(model):
            cache.clear()
        _towers[model] = found


def hash_of_tower(model: torch.nn.Module) -> int:
    """Return a hash over the parameters of this rank outside of the language model, of all without such ones."""
    from slime_engine_plugin.weights.changes import hash_of

    named: list[tuple[str, Any]] = list(model.named_parameters())
    tower = [parameter for name, parameter in named if not _LANGUAGE_MODEL.match(name)]
    return hash_of(tower or [parameter for _, parameter in named])


def register() -> None:
    """Register the hooks."""
    updater = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
    cache = "sglang.srt.mem_cache.multimodal_cache.MultiModalStaticCache"
    require(f"{cache}.get", "self mm_hashes combined_hash")
    require(f"{cache}.get_single", "self mm_hash")
    require(f"{cache}.clear", "self")
    for how in ("disk", "distributed", "tensor", "ipc"):
        HookRegistry.register(f"{updater}.update_weights_from_{how}", note_update, HookType.BEFORE)
    for lookup in ("get", "get_single"):
        HookRegistry.register(f"{cache}.{lookup}", forget_old, HookType.BEFORE)
