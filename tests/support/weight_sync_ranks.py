"""Trainer ranks of the weight-sync tests: build a model, connect to engines, push."""

from __future__ import annotations

import contextlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.megatron_model import model_args
from tests.support.ranks import loaded_model, switch_layout


def push(
    checkpoint: str,
    engines: list[dict[str, Any]],
    flags: list[str],
    *,
    colocate: bool = False,
    synchronous_loop: bool = True,
    export_to: str | None = None,
    change_one_weight: bool = False,
    stored_as: str | None = None,
) -> dict[str, Any]:
    """Push the weights of ``checkpoint`` twice, with ``change_one_weight`` one weight differs the second time.

    ``stored_as``: the checkpoint of the engines, where it is quantized. Returns the versions and bytes of both pushes.
    ``export_to`` receives the HF export of the first push's weights.
    """
    from slime.backends.megatron_utils.weights import export_hf
    from slime.servers.types import EngineInfo
    from slime.weight_sync import create_updater
    from slime.weight_sync.quantized import quantizer_of

    args = model_args(stored_as or checkpoint, *flags)
    args.colocate, args.weight_sync_timeout = colocate, 120.0
    switch_layout(args)
    model = loaded_model(args, checkpoint, ddp=False)
    updater = create_updater(args, SimpleNamespace(model=model, args=args), synchronous_loop=synchronous_loop)
    updater.connect([EngineInfo(**engine) for engine in engines])
    versions, sent = [updater.update()], [updater.bytes_sent]
    if export_to is not None:
        export_hf(model, args, export_to)
        if stored_as is not None:
            export_hf(model, args, f"{export_to}-quantized", max_shard_bytes=50_000, quantizer=quantizer_of(args))
    if change_one_weight:
        with torch.no_grad():
            for name, parameter in (item for chunk in model for item in chunk.named_parameters()):
                if name.endswith("final_layernorm.weight"):
                    parameter[0] += 1e-4
    versions.append(updater.update())
    sent.append(updater.bytes_sent)
    updater.disconnect()
    return {"versions": versions, "bytes": sent}


def push_without_a_victim(
    checkpoint: str, engines: list[dict[str, Any]], flags: list[str], *, victim: int, signum: int, timeout: float
) -> dict[str, Any]:
    """Push; push again while the last engine's processes ``victim`` get a signal in the middle; push to the others.

    Returns the message of the failed push and the versions of the others.
    """
    from slime.servers.types import EngineInfo
    from slime.utils.process_supervisor import descendants
    from slime.weight_sync import WeightSyncError, create_updater, process_group

    args = model_args(checkpoint, *flags)
    args.colocate, args.weight_sync_timeout = False, timeout
    switch_layout(args)
    model = loaded_model(args, checkpoint, ddp=False)
    updater = create_updater(args, SimpleNamespace(model=model, args=args), synchronous_loop=True)
    infos = [EngineInfo(**engine) for engine in engines]
    updater.connect(infos)
    versions = [updater.update()]
    family = [victim, *descendants(victim)]

    def signal_family(number: int) -> None:
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    sends = 0
    send = process_group.EngineGroup.send

    def send_and_strike(self: Any, bucket: Any, *, weight_version: str | None) -> None:
        nonlocal sends
        sends += 1
        if sends == 2:
            signal_family(signum)
        send(self, bucket, weight_version=weight_version)

    process_group.EngineGroup.send = send_and_strike  # type: ignore[method-assign]
    reported = ""
    try:
        updater.update()
    except WeightSyncError as e:
        reported = str(e)
    process_group.EngineGroup.send = send  # type: ignore[method-assign]
    signal_family(signal.SIGKILL)  # as the fleet does with an engine that does not answer
    updater.connect(infos[:-1])
    versions.append(updater.update())
    updater.disconnect()
    return {"versions": versions, "reported": reported}
