"""Trainer ranks of the tests of weights through files: build a model, write versions of its weights."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.megatron_model import model_args
from tests.support.ranks import error_of, loaded_model, switch_layout

HOOK = "tests.support.weight_file_ranks.note_hook"
CALLS: list[tuple[int, str, list[str], bool]] = []


def note_hook(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Hook: note the rank, its arguments, and whether the version is complete."""
    complete = (Path(version_dir) / "model.safetensors.index.json").is_file()
    CALLS.append((int(os.environ["RANK"]), version_dir, [engine.url for engine in rollout_engines], complete))


def fail_on_rank_1(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Hook: fail on one of the ranks."""
    if os.environ["RANK"] == "1":
        raise OSError("the bucket is gone")


def publish(checkpoint: str, folder: str, flags: list[str]) -> dict[str, Any]:
    """Write two versions of the weights of ``checkpoint``, and a third whose hook fails on one rank."""
    from slime.servers.types import EngineInfo
    from slime.weight_sync import WeightSyncError
    from slime.weight_sync.files import publish

    args = model_args(checkpoint, *flags)
    args.update_weight_disk_dir, args.update_weight_disk_keep_files = folder, False
    args.update_weight_local_checkpoint_dir = "/local"  # not used here: it asks for checksums
    args.custom_update_weight_post_write_path = HOOK
    switch_layout(args)
    source = SimpleNamespace(model=loaded_model(args, checkpoint, ddp=False), args=args)
    engines = [EngineInfo("http://engine:1")]
    for version in (1, 2):
        found = str(publish(args, source, version, engines))
    listed = sorted(os.listdir(folder))
    args.custom_update_weight_post_write_path = "tests.support.weight_file_ranks.fail_on_rank_1"
    args.update_weight_disk_keep_files = True
    reported = error_of(lambda: publish(args, source, 3, engines), WeightSyncError)
    args.custom_update_weight_post_write_path = None
    densities = publish_changes(source, f"{folder}-delta", engines)
    return {
        "directory": found, "listed": listed, "calls": list(CALLS), "reported": reported, "densities": densities,
    }  # fmt: skip


def publish_changes(source: Any, folder: str, engines: list[Any]) -> list[float]:
    """Write the weights of ``source`` to ``folder``, then two times what changed in about one of a hundred elements.

    The weights of the end are exported to ``<folder>/export``. Return how much of each version was written.
    """
    import torch

    from slime.backends.megatron_utils.weights import export_hf
    from slime.weight_sync.files import DeltaWriter, publish

    args = source.args
    args.update_weight_mode, args.update_weight_disk_dir = "delta", folder
    writer, densities = DeltaWriter(args), []
    for version in (1, 2, 3):
        publish(args, source, version, engines, delta=writer, confirmed=version - 1 or None)
        densities.append(writer.density)
        make = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in (p for chunk in source.model for p in chunk.parameters() if version < 3):
                chosen = torch.rand(parameter.shape, generator=make) < 0.01
                parameter[chosen] += torch.randn(int(chosen.sum()), generator=make) / 50
    export_hf(source.model, args, f"{folder}/export")
    return densities
