"""Weights through files: the trainers' half. What engines do with the files: ``steps.load_files``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights import export_hf
from slime.servers.types import EngineInfo
from slime.utils.digests import digest
from slime.utils.misc import load_function
from slime.weight_sync.delta import DeltaWriter
from slime.weight_sync.fanout import WeightSyncError, attempt
from slime.weight_sync.quantized import quantizer_of
from slime.weight_sync.transport import WeightSource
from slime.weights import versions


def publish(
    args: Args,
    source: WeightSource,
    version: int,
    engines: Sequence[EngineInfo],
    *,
    delta: DeltaWriter | None = None,
    confirmed: int | None = None,
) -> Path:
    """Write the weights as version ``version`` below ``--update-weight-disk-dir``; return its directory.

    Collective over the trainer. With ``delta`` it holds what changed since version ``confirmed``, which all engines
    have, or everything where that is due. The directory appears when it is complete; versions of earlier runs, or of
    earlier pushes that engines have read, are removed before (not those that ``delta`` builds on), unless
    ``--update-weight-disk-keep-files``. Then every rank calls the hook ``--custom-update-weight-post-write-path`` with
    ``(args, directory, engines)``. Raises WeightSyncError or RuntimeError on every rank when one of them fails.
    """
    final = versions.version_dir(args.update_weight_disk_dir, version)
    staging = versions.staging_dir(final)
    needed: list[Path] = []
    if delta is not None:
        root = args.update_weight_disk_dir
        attempt(lambda: needed.extend(versions.version_dir(root, number) for number in delta.begin(confirmed)))
    attempt(partial(_on_first_rank, _clear, args, needed))
    if delta is None or not delta.write(source, staging, version):
        export_hf(source.model, source.args, staging, quantizer=quantizer_of(source.args))
        if args.update_weight_local_checkpoint_dir is not None:
            _write_checksums(staging)
        if delta is not None:
            delta.wrote_whole(source, staging, version)
    attempt(partial(_on_first_rank, versions.replace, staging, final))
    if args.custom_update_weight_post_write_path is not None:
        attempt(partial(_call_hook, args, final, engines))
    return final


def _on_first_rank(action: object, *arguments: object) -> None:
    if dist.get_rank() == 0:
        action(*arguments)  # type: ignore[operator]


def _clear(args: Args, needed: Sequence[Path]) -> None:
    root = Path(args.update_weight_disk_dir)
    root.mkdir(parents=True, exist_ok=True)
    if not args.update_weight_disk_keep_files:
        versions.clear(root, but=needed)


def _write_checksums(directory: Path) -> None:
    """Each rank reads its share of the files back; rank 0 writes the sums of all."""
    own: dict[str, str] = {}

    def read() -> None:
        mine = sorted(directory.iterdir())[dist.get_rank() :: dist.get_world_size()]
        own.update({path.name: digest(path) for path in mine})

    attempt(read)
    everything = {name: value for part in gather_from_world(own) for name, value in part.items()}
    attempt(partial(_on_first_rank, versions.write_checksums, directory, everything))


def _call_hook(args: Args, directory: Path, engines: Sequence[EngineInfo]) -> None:
    flag, path = "--custom-update-weight-post-write-path", args.custom_update_weight_post_write_path
    try:
        load_function(path, flag)(args, str(directory), list(engines))
    except Exception as e:
        raise WeightSyncError(f"{flag} {path}: {type(e).__name__}: {e}") from e
