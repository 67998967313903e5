"""Let the draft layers of a model take the weights that are broadcast to it.

A stock server loads a broadcast into the target alone (tensors and files into the draft as well): draft layers that are
part of the checkpoint (MTP) would keep the weights of the start. A draft model with a separate checkpoint is none of
the trainer's: its tensors have the names of the target's, and other meanings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from torch.nn import Module

_own: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()


def note_own_drafts(manager: SchedulerWeightUpdaterManager, request: object) -> None:
    """Before ``SchedulerWeightUpdaterManager.update_weights_from_distributed``, which knows target and draft.

    Once: a load from files changes the path of the model, and what the draft is made of stays.
    """
    target, args = manager.tp_worker.model_runner.model, manager.tp_worker.server_args
    if target in _own:
        return
    worker: Any = getattr(manager.draft_worker, "draft_worker", None)  # n-grams have no model
    own = args.speculative_draft_model_path in (None, args.model_path)
    _own[target] = [runner.model for runner in worker.draft_runners] if own and worker is not None else []


def own_drafts(target: Module) -> Sequence[Any]:
    """Return the draft models that are made of the checkpoint of ``target``."""
    return _own.get(target, [])


@contextmanager
def loading_too(target: Any, drafts: Sequence[Any]) -> Iterator[None]:
    """Within the body ``drafts`` load what ``target`` loads."""
    if not drafts:
        yield
        return
    load = target.load_weights

    def load_all(weights: Iterable[Any]) -> None:
        weights = list(weights)
        load(weights)
        for draft in drafts:
            draft.load_weights(weights)

    target.load_weights = load_all
    try:
        yield
    finally:
        del target.load_weights


def register() -> None:
    """Register the hook."""
    target = (
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        ".update_weights_from_distributed"
    )
    require(target, "self recv_req")
    HookRegistry.register(target, note_own_drafts, HookType.BEFORE)
