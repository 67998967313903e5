"""From trained weights to the engines."""

from __future__ import annotations

from typing import Literal

from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.traits import Contract, Needs


class WeightSync(ArgumentGroup):
    """Weight synchronization."""

    title = "weight synchronization"
    read_by = "run"

    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "send all weights to the engines, or only the bytes that changed"
    )
    update_weight_transport: Literal["nccl", "disk", "p2p"] = flag(
        "nccl",
        "nccl: a process group to the engines (gloo without GPUs), shared memory with --colocate; disk: files; p2p: "
        "every trainer rank writes into the engines' memory, without GPUs and on one host",
    )
    update_weight_p2p_backend: Literal["nixl", "mooncake"] = flag(
        "nixl",
        "what writes over TCP, with --update-weight-transport p2p; each needs the package of that name",
        needs="--update-weight-transport p2p",
    )
    update_weight_buffer_size: int = flag(
        512 * 1024**2,
        "bytes of weights sent at a time; larger is faster and needs more memory",
        gt=0,
        read_by="trainers",
    )
    update_weights_interval: int = flag(1, "rollouts between two weight syncs, in train_async.py", ge=1)
    update_weight_disk_dir: str | None = flag(
        None,
        "directory that trainers and engines share, with --update-weight-transport disk",
        path="directory",
        needs="--update-weight-transport disk",
    )
    update_weight_disk_keep_files: bool = flag(
        False, "keep the files of that directory after engines have read them", needs="--update-weight-transport disk"
    )
    update_weight_local_checkpoint_dir: str | None = flag(
        None,
        "directory on each engine host to which weights are copied, and verified, before engines load them, with "
        "--update-weight-transport disk; --update-weight-mode delta needs it there",
        path="directory",
        needs="--update-weight-transport disk",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag(
        "xor",
        "how changed values are stored, with --update-weight-mode delta; xor: as differences, which are smaller; "
        "overwrite: as they are, so that an interrupted update of a host can be continued; always so without "
        "--update-weight-transport disk",
        needs=Needs("--update-weight-mode delta", lambda args: args.rollout_external),
    )
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = flag(
        "xxh3-128",
        "checksum per tensor, with --update-weight-mode delta; blake3 needs the package of that name",
        needs=Needs("--update-weight-mode delta", lambda args: args.rollout_external),
    )
    update_weight_delta_full_interval: int = flag(
        20,
        "versions after which all weights are sent again, with --update-weight-mode delta",
        ge=1,
        needs=Needs("--update-weight-mode delta", lambda args: args.rollout_external),
    )
    custom_update_weight_post_write_path: DottedPath | None = flag(
        None,
        "dotted path of a hook that every trainer rank calls after files are written, with --update-weight-transport "
        "disk",
        hook=Contract("fn(args, version_dir, rollout_engines)", 3, caller="trainer"),
        needs="--update-weight-transport disk",
    )
    sglang_custom_pull_weights_pre_read_hook: DottedPath | None = flag(
        None,
        "dotted path of a hook that is called on the host of each engine before it reads files of weights, with "
        "--update-weight-local-checkpoint-dir",
        hook=Contract("fn(source_dir, target_version)", 2),
        needs="--update-weight-local-checkpoint-dir",
    )
    check_weight_update_equal: bool = flag(False, "prove every sync: snapshot, reset, sync, compare and checksums")
    weight_sync_timeout: float = flag(600.0, "seconds one weight sync may take", gt=0)
    weight_sync_pause_mode: Literal["auto", "abort", "retract", "in_place"] = flag(
        "auto",
        "what happens to requests in flight; auto: abort in the synchronous loop and with prefill engines, survive in "
        "the asynchronous one",
    )
