"""Checks the ``overrides`` of an ``--sglang-config`` file against the arguments of the installed SGLang."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from slime.arguments.files.flag_values import of_older_flag, typed
from slime.arguments.files.yaml_source import Document, KeyPath
from slime.arguments.flag import Flag
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record


def check_overrides(document: Document) -> list[str]:
    """Type the overrides in ``document.data`` and note values of the wrong type.

    Returns a warning for every key that SGLang does not have: engines of another version might.
    """
    known = _server_arguments()
    warnings = []
    for at, overrides in _all_overrides(document):
        for name in list(overrides):
            place = (*at, name)
            flag = known.get(str(name).replace("-", "_"))
            if flag is None:
                renamed = of_older_flag(document, place, prefix="sglang-")
                if renamed is None:
                    warnings.append(_unknown(document, place, list(known)))
                else:
                    del overrides[name]
                    fields = {dest.removeprefix("sglang_"): value for dest, value in renamed.items()}
                    overrides.update({**fields, **overrides})
            elif _is_checked(flag, overrides[name]):
                try:
                    overrides[name] = typed(flag, document, place)
                except ValueError as error:
                    document.note(place, str(error))
    return [*document.warnings, *warnings]


def _is_checked(flag: Flag, value: object) -> bool:
    """Only where the command line and the field of SGLang's dataclass agree: it also takes null, mappings and lists."""
    checked = flag.action in ("true", "false", "tristate") or flag.kind in ("int", "float", "human_int")
    return checked and value is not None and not isinstance(value, dict | list)


def _server_arguments() -> dict[str, Flag]:
    records = catalog.records(catalog.SGLANG)
    return {r["dest"]: flag_of_record(r, prefix="", source="sglang", group="") for r in records}


def _all_overrides(document: Document) -> Iterator[tuple[KeyPath, dict[str, object]]]:
    models = document.data.get("sglang")
    for i, model in enumerate(models if isinstance(models, list) else []):
        for key in ("server_groups", "engine_groups"):
            groups = model.get(key) if isinstance(model, dict) else None
            for j, group in enumerate(groups if isinstance(groups, list) else []):
                overrides = group.get("overrides") if isinstance(group, dict) else None
                if isinstance(overrides, dict):
                    yield ("sglang", i, key, j, "overrides"), overrides


def _unknown(document: Document, at: KeyPath, known: list[str]) -> str:
    name = str(at[-1])
    guess = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    meant = f"; did you mean {guess[0]}?" if guess else ""
    version = catalog.installed_version(catalog.SGLANG) or catalog.SGLANG.pinned
    return (
        f"{document.option} {document.path}, line {document.line(at)}: sglang {version} has no argument {name}, and "
        f"engines do without it{meant}"
    )
