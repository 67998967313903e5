"""Megatron's flags: the fields of megatron-core's configuration classes, spelled the way Megatron-LM does."""

from __future__ import annotations

from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.megatron_table import HAND_TABLE, MODEL, NOT_FLAGS, OPTIMISER, PARALLEL

_PARALLEL_WORDS = ("parallel", "pipeline", "tp_comm", "p2p", "microbatch", "comm_type", "wgrad", "hierarchical")


def megatron_flags() -> list[Flag]:
    """Every flag made from a configuration field, and the hand-written ones, which win."""
    taken = {name for flag in HAND_TABLE for name in (flag.dest, flag.field) if name}
    records = [r for r in catalog.records(catalog.MEGATRON) if r["name"] not in taken and r["name"] not in NOT_FLAGS]
    return [*HAND_TABLE, *(_flag_of(record) for record in records)]


def aliases() -> dict[str, str]:
    """Attribute on the namespace -> name of the configuration field that means the same."""
    return {flag.dest: flag.field for flag in HAND_TABLE if flag.field and flag.field != flag.dest}


def config_defaults() -> dict[str, Any]:
    """Fields that are set by slime and have no flag, with the value that holds until a rule changes it."""
    return {"variable_seq_lengths": True, "deallocate_pipeline_outputs": True}


def _flag_of(record: dict[str, Any]) -> Flag:
    name, default = record["name"], record["default"]
    stem = name.replace("_", "-")
    common: dict[str, Any] = {
        "dest": name, "default": default, "help": record["help"], "group": _group_of(record), "source": "megatron",
    }  # fmt: skip
    if record["kind"] == "bool":
        if default is True:
            options = tuple(record["options"] or ("--no-" + stem, "--disable-" + stem))
            return Flag(options=options, action="false", **common)
        return Flag(options=tuple(record["options"] or ("--" + stem,)), action="true", **common)
    choices = record.get("choices")
    return Flag(
        options=tuple(record["options"] or ("--" + stem,)),
        kind=record["kind"],
        choices=tuple(choices) if choices else None,
        nargs=record.get("nargs"),
        collapse=record.get("collapse", False),
        **common,
    )


def _group_of(record: dict[str, Any]) -> str:
    if "OptimizerConfig" in record["classes"] and "TransformerConfig" not in record["classes"]:
        return OPTIMISER
    parallel = record["classes"][0] == "DistributedDataParallelConfig"
    return PARALLEL if parallel or any(word in record["name"] for word in _PARALLEL_WORDS) else MODEL
