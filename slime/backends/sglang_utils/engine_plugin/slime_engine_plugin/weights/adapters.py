"""Adapters that a trainer pushes: requests are answered with the newest one, and say which one that was.

A push loads ``policy@<version>-<unique>`` beside its predecessors while requests run (``--lora-sync adapter``). With
``/update_weight_version`` it becomes the one of every request that names none: clients, agents and routers need not
know of adapters. Requests that began earlier continue under theirs, and report its version: a stock server would report
the number that it was given last. Adapters that are no longer used are unloaded here: a stock server that is asked
to unload one holds back the next load until the last request of it has ended.

On a CPU SGLang's adapters ask for pinned memory, which torch refuses to make without CUDA.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import GenerateReqInput, UpdateWeightVersionReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

PUSHED = re.compile(r"policy@(\d+)-\w+")
KEPT = 2
"""The newest adapters that stay: a request may have chosen the one before, and not be counted as its user yet."""


class Newest:
    """The adapter of requests that name none; None before the first push."""

    name: str | None = None


def version_of(name: str | None) -> str | None:
    """Return the version in the name of a pushed adapter; None for another name."""
    match = PUSHED.fullmatch(name or "")
    return None if match is None else match[1]


async def generate_with_newest(
    generate: Callable[..., Any], manager: TokenizerManager, request: GenerateReqInput, *args: object, **kwargs: object
) -> AsyncIterator[Any]:
    """Around ``TokenizerManager.generate_request``."""
    if request.lora_path is None:
        request.lora_path = Newest.name
    async with contextlib.aclosing(generate(manager, request, *args, **kwargs)) as answers:
        async for answer in answers:
            state_version(answer, request.lora_path)
            yield answer


def state_version(answer: list[Any] | dict[str, Any], path: str | list[str | None] | None) -> None:
    """Write the version of the adapter ``path`` into an answer; of a batch there is a list of either, or both."""
    if isinstance(answer, list):
        for i, one in enumerate(answer):
            state_version(one, path[i] if isinstance(path, list) else path)
        return
    version = version_of(path[answer.get("index", 0)] if isinstance(path, list) else path)
    if version is not None:
        answer["meta_info"]["weight_version"] = version
        answer["meta_info"].pop("weight_versions", None)  # those of the engine, which changed while the request ran


async def use_newest(
    update: Callable[..., Any], manager: TokenizerManager, request: UpdateWeightVersionReqInput
) -> None:
    """Around ``TokenizerManager.update_weight_version``: the adapter of that version, loaded last, is the newest."""
    await update(manager, request)
    pushed = [name for name in manager.lora_registry.get_all_adapters() if version_of(name) is not None]
    loaded = [name for name in pushed if version_of(name) == request.new_version]
    if not loaded:
        return
    Newest.name = loaded[-1]
    pushed.remove(Newest.name)
    for name in sorted(pushed, key=lambda name: int(version_of(name) or 0))[: 1 - KEPT]:
        await _unload_unused(manager, name)


async def _unload_unused(manager: TokenizerManager, name: str) -> None:
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

    registry = manager.lora_registry
    lora_id = registry.get_all_adapters()[name].lora_id
    if registry._counters[lora_id].value() == 0:
        await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
        manager.lora_ref_cache.pop(name, None)  # from which a server would load it again, by a path


def without_pinned_memory() -> None:
    """Let torch take memory that is not pinned where pinned memory is asked for."""
    for name in ("tensor", "zeros", "empty", "ones", "arange", "full"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)  # noqa: B010


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: object, pin_memory: bool = False, **kwargs: object) -> Any:
        return make(*args, **kwargs)

    return made


def register(on_cpu: bool) -> None:
    """Register the hooks."""
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}.generate_request", generate_with_newest, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.update_weight_version",
        use_newest,
        HookType.AROUND,
    )
    if on_cpu:
        without_pinned_memory()
