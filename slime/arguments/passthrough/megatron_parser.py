"""Join slime's Megatron flags with those of the parser of Megatron-LM's training scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slime.arguments.flag import Flag
from slime.arguments.passthrough.sglang import flag_of_record

# Group of the flags that only the installed Megatron-LM knows: nothing in slime reads them.
UNREAD = "Megatron: read by its training scripts only"


def merged(ours: Sequence[Flag], records: Sequence[dict[str, Any]]) -> list[Flag]:
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
