"""Megatron's flags: the fields of megatron-core's configuration classes, spelled the way Megatron-LM does.

Where Megatron-LM's training scripts can be imported, and megatron.core is not another one than theirs, their parser has
the last word about what it offers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from slime.arguments.flag import Flag, first_of_each
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.megatron_table import HAND_TABLE, MODEL, NOT_FLAGS, OPTIMIZER, PARALLEL, script_flags
from slime.arguments.passthrough.sglang import flag_of_record
from slime.arguments.passthrough.source import (
    CHECKOUT,
    CORE_VARIABLE,
    MEGATRON,
    MEGATRON_LM,
    checkout,
    installed_directory,
    installed_version,
    unused_core,
)
from slime.arguments.passthrough.traits import with_traits

# Group of the flags that only the installed Megatron-LM knows: nothing in slime reads them.
UNREAD = "Megatron: read by its training scripts only"
_PARALLEL_WORDS = ("parallel", "pipeline", "tp_comm", "p2p", "microbatch", "comm_type", "wgrad", "hierarchical")


@cache
def megatron_flags() -> tuple[Flag, ...]:
    """The hand-written flags, which win, and one for every other configuration field."""
    taken = {name for flag in HAND_TABLE for name in (flag.dest, flag.field) if name}
    found = [r for r in catalog.records(catalog.MEGATRON) if r["kind"] is not None]
    fields = [_flag_of(r) for r in found if r["name"] not in taken and r["name"] not in NOT_FLAGS]
    ours = first_of_each([*HAND_TABLE, *fields, *script_flags()])
    offered, _ = _training_scripts()
    flags = ours if offered is None else _merged(ours, offered)
    return tuple(map(with_traits, flags))


def warnings() -> list[str]:
    """Return what the user should know about where megatron-core and the flags come from."""
    version, unused, used = installed_version(MEGATRON), unused_core(), checkout(MEGATRON)
    found = []
    if unused is not None:
        found.append(
            f"megatron.core is the installed {version}, not the copy in {unused.parents[1]} that comes first on the "
            f"PYTHONPATH; {CORE_VARIABLE}={CHECKOUT} uses that one, with which slime is not tested"
        )
    elif used is not None and installed_directory(MEGATRON) is not None:
        found.append(
            f"megatron.core is the copy in {used.parents[1]}, as {CORE_VARIABLE}={CHECKOUT} says, not the installed "
            f"{version}; slime is tested with {MEGATRON.pinned}"
        )
    _, reason = _training_scripts()
    if reason is not None:
        found.append(
            f"the flags of Megatron-LM in {checkout(MEGATRON_LM)} cannot be read, those of megatron-core's "
            f"configuration classes are used: {reason}"
        )
    return found


def aliases() -> dict[str, str]:
    """Attribute on the namespace -> name of the configuration field that means the same."""
    return {flag.dest: flag.field for flag in megatron_flags() if flag.field and flag.field != flag.dest}


def config_defaults() -> dict[str, Any]:
    """Fields that are set by slime and have no flag, with the value that holds until a rule changes it."""
    return {"variable_seq_lengths": True, "deallocate_pipeline_outputs": True}


@cache
def _training_scripts() -> tuple[list[dict[str, Any]] | None, str | None]:
    """The records of ``megatron.training``'s parser (None without it), and why it could not be read."""
    if checkout(catalog.MEGATRON_LM) is None:
        return None, None
    found = catalog.records_or_reason(catalog.MEGATRON_LM)
    return (None, found) if isinstance(found, str) else (found, None)


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
        return OPTIMIZER
    parallel = record["classes"][0] == "DistributedDataParallelConfig"
    return PARALLEL if parallel or any(word in record["name"] for word in _PARALLEL_WORDS) else MODEL


def _merged(ours: Sequence[Flag], records: Sequence[dict[str, Any]]) -> list[Flag]:
    """The flags of the parser's ``records``, then those of ``ours`` that it does not have.

    Spelling, type, choices, default and help are the parser's. The attribute slime reads and the field of the
    configuration classes stay those of ``ours``; an attribute that is called otherwise by Megatron-LM is set too.
    """
    by_dest = {flag.dest: flag for flag in ours}
    by_option = {option: flag for flag in ours for option in flag.options}
    flags: list[Flag] = []
    used: set[str] = set()
    options: set[str] = set()
    for record in _one_per_attribute(records):
        known = by_dest.get(record["dest"]) or next(
            (by_option[option] for option in record["options"] if option in by_option), None
        )
        flag = _joined(record, None if known is None or known.dest in used else known)
        flags.append(flag)
        used.add(flag.dest)
        options.update(flag.options)
    return [*flags, *(flag for flag in ours if flag.dest not in used and not options.intersection(flag.options))]


def _joined(record: dict[str, Any], known: Flag | None) -> Flag:
    offered = replace(flag_of_record(record, prefix="", source="megatron", group=UNREAD), field=None)
    if known is None:
        return offered
    return replace(
        offered,
        dest=known.dest,
        field=known.field or (record["dest"] if record["dest"] != known.dest else None),
        group=known.group,
        help=offered.help or known.help,
        collapse=known.collapse and offered.nargs is not None,
        traits=known.traits,
    )


def _one_per_attribute(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records that set one attribute, joined: a pair of opposite switches, or several spellings of one flag."""
    found: dict[str, dict[str, Any]] = {}
    for record in records:
        earlier = found.get(record["dest"])
        if earlier is None:
            found[record["dest"]] = record
        elif {earlier["action"], record["action"]} == {"true", "false"}:
            on, off = (earlier, record) if earlier["action"] == "true" else (record, earlier)
            pair = [on["options"][0], off["options"][0]]
            found[record["dest"]] = {**earlier, "action": "tristate", "options": pair}
        else:
            found[record["dest"]] = {**earlier, "options": [*earlier["options"], *record["options"]]}
    return list(found.values())
