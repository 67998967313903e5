"""SGLang's server flags with the prefix ``--sglang-``.

Whatever the installed version registers is offered, but for what slime sets itself.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.traits import with_traits

# Owned by slime, which sets them for every engine itself -> what to do instead.
OWNED: dict[str, str] = {
    "model_path": "give --hf-checkpoint",
    "config": "give the flags themselves",
    "trust_remote_code": "give --trust-remote-code",
    "random_seed": "give --seed",
    "enable_memory_saver": "give --offload-rollout",
    "port": "slime picks a free one",
    "nnodes": "it follows from --rollout-num-gpus-per-engine and --num-gpus-per-node",
    "node_rank": "it follows from the placement",
    "dist_init_addr": "slime picks a free one",
    "gpu_id_step": "it follows from the placement",
    "base_gpu_id": "it follows from the placement",
    "nccl_port": "slime picks a free one",
    "skip_server_warmup": "slime waits until engines answer",
    "enable_return_routed_experts": "give --use-rollout-routing-replay",
}
# Its names in SGLang's versions.
TENSOR_PARALLEL = ("tp_size", "tensor_parallel_size")


def owned_options() -> dict[str, str]:
    """Option that is not offered (``--sglang-tp-size``) -> what to do instead."""
    return {
        "--sglang-" + option.lstrip("-"): OWNED[record["dest"]]
        for record in catalog.records(catalog.SGLANG)
        if record["dest"] in OWNED
        for option in record["options"]
    }


def flag_of_record(record: dict[str, Any], *, prefix: str, source: str, group: str) -> Flag:
    """Turn a parser record into a flag.

    ``prefix`` (``sglang``) goes in front of every option, short ones too, and of the attribute, unless it is there.
    """

    def prefixed(option: str) -> str:
        stem = option.lstrip("-")
        return "--" + (stem if stem.startswith(f"{prefix}-") else f"{prefix}-{stem}") if prefix else option

    dest = record["dest"]
    if prefix and not dest.startswith(f"{prefix}_"):
        dest = f"{prefix}_{dest}"

    return Flag(
        dest=dest,
        options=tuple(prefixed(o) for o in record["options"]),
        default=record["default"],
        kind=record["kind"],
        action=record["action"],
        nargs=record["nargs"],
        const=record["const"],
        choices=tuple(record["choices"]) if record["choices"] else None,
        help=record["help"],
        group=group,
        source=source,
        field=record["dest"],
    )


def sglang_flags() -> list[Flag]:
    """Every flag of the installed SGLang server that slime does not set itself; ``field`` is SGLang's own name."""
    flags = []
    for record in catalog.records(catalog.SGLANG):
        if record["dest"] in OWNED:
            continue
        flag = flag_of_record(record, prefix="sglang", source="sglang", group="SGLang server")
        if flag.field in TENSOR_PARALLEL:  # the size of an engine decides; giving it is allowed, to say the same
            help = "tensor parallelism of an engine; follows from --rollout-num-gpus-per-engine and --sglang-pp-size"
            flag = replace(flag, dest="sglang_tp_size", default=None, help=help)
        flags.append(with_traits(flag))
    return flags


def lacking_attributes() -> list[str]:
    """The attributes of flags that the pinned SGLang has and the installed one has not."""
    if catalog.version_words(catalog.SGLANG).startswith(str(catalog.SGLANG.pinned)):
        return []
    installed = {record["dest"] for record in catalog.records(catalog.SGLANG)}
    pinned = json.loads(catalog.shipped_list(catalog.SGLANG).read_text())
    return [f"sglang_{record['dest']}" for record in pinned if record["dest"] not in installed | OWNED.keys()]
