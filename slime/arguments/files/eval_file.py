"""``--eval-config``: a YAML or JSON file of evaluation data sets."""

from __future__ import annotations

from typing import Any

from slime.arguments.files import interpolation
from slime.arguments.files.eval_schema import EvalDataset, EvalDefaults, EvalSection
from slime.arguments.files.schema import check_unique, unknown_key, validate
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.files.yaml_source import read as read_yaml

OPTION = "--eval-config"


def read(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The data sets of the file ``path`` and its ``defaults``, both as the file gives them.

    Raises ``ArgumentError`` for all mistakes at once.
    """
    document = read_yaml(path, OPTION)
    interpolation.resolve(document)
    section: KeyPath = ("eval",) if "eval" in document.data else ()
    if section and not isinstance(document.data["eval"], dict):
        got = seen(document.data["eval"])
        document.note(section, f"expected `defaults` and `datasets`, indented below it, got {got}")
        document.check()
    _check_keys(document, section)
    defaults = _defaults(document, (*section, "defaults"))
    entries = _entries(document, (*section, "datasets"))
    document.check()
    return entries, defaults


def _check_keys(document: Document, section: KeyPath) -> None:
    """Keys beside ``defaults`` and ``datasets`` are mistakes, unless an interpolation refers to them."""
    known = [*EvalSection.model_fields, *(() if section else ("eval",))]
    for name in document.value(section) if section else document.data:
        if name not in known and not document.mentions("${" + str(name)):
            document.note((*section, name), unknown_key(str(name), known))
    misplaced = [name for name in EvalSection.model_fields if section and name in document.data]
    for name in misplaced:
        document.note((name,), "belongs below `eval:`; indent it by two more spaces")


def _defaults(document: Document, at: KeyPath) -> dict[str, Any]:
    if document.value(at) is None:
        return {}
    found = validate(document, EvalDefaults, at)
    return found.model_dump(exclude_unset=True) if found is not None else {}


def _entries(document: Document, at: KeyPath) -> list[dict[str, Any]]:
    datasets = document.value(at)
    if not datasets or not isinstance(datasets, list | dict):
        got = f", got {seen(datasets)}" if isinstance(datasets, str | int) else ""
        document.note(at, f"no data sets: expected a list of mappings with name and path{got}")
        return []
    if isinstance(datasets, dict) and isinstance(datasets.get("path"), str):
        document.note(at, "expected a list; start every data set with a dash: `- name: ...`")
        return []
    found = []
    for key in datasets if isinstance(datasets, dict) else range(len(datasets)):
        if isinstance(datasets, dict):
            datasets[key] = {"name": key, **(datasets[key] or {})} if _is_entry(datasets[key]) else datasets[key]
        dataset = validate(document, EvalDataset, (*at, key))
        if dataset is not None:
            found.append((key, dataset))
    check_unique(document, [((*at, key, "name"), dataset.name) for key, dataset in found])
    return [dataset.model_dump(exclude_unset=True) for _, dataset in found]


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, dict)
