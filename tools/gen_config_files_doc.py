"""Put the tables of keys into ``docs/en/reference/config_files.md``; ``--check`` only compares.

Each table below a comment ``<!-- keys: MODEL -->`` is replaced by the keys of that pydantic model.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from annotated_types import Ge, Gt, Le

from slime.arguments.command_line import all_flags
from slime.arguments.files import environments, eval_config, sglang_config
from slime.arguments.files.eval_config import FALLBACKS
from slime.arguments.files.schema import FileModel, spellings
from slime.arguments.rules import roles
from tools.generated_page import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "config_files.md"
MODELS: dict[str, type[FileModel]] = {
    model.__name__: model
    for model in (
        eval_config.EvalSection, eval_config.EvalDataset, roles.RoleConfig, roles.RoleEntry,
        environments.EnvironmentEntry, environments.Difficulty, environments.McpServer,
        sglang_config.SglangFile, sglang_config.ModelConfig, sglang_config.ServerGroupConfig,
    )
}  # fmt: skip
_WORDS = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "mapping", Any: "anything"}
_TABLE = re.compile(r"(<!-- keys: (\w+) -->\n)(?:\|.*\n)*")


def table(model: type[FileModel]) -> str:
    """The table of the keys of ``model``, required ones first."""
    names = sorted(model.model_fields, key=lambda name: not model.model_fields[name].is_required())
    lines = ["| key | value | without it | |", "|---|---|---|---|", *(_row(model, name) for name in names)]
    return "".join(f"{line}\n" for line in lines)


def _row(model: type[FileModel], name: str) -> str:
    field = model.model_fields[name]
    keys = " or ".join(f"`{spelling}`" for spelling in spellings(model, name))
    limits = [_limit(limit) for limit in field.metadata if isinstance(limit, Ge | Gt | Le)]
    value = ", ".join([_words(field.annotation), *limits])
    return f"| {keys} | {value} | {_default(model, name)} | {field.description} |"


def _default(model: type[FileModel], name: str) -> str:
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    if model is eval_config.EvalDataset and name in FALLBACKS:
        options = {flag.dest: flag.option for flag in all_flags()}
        return ", ".join(f"`{options[dest]}`" for dest in FALLBACKS[name] if dest in options)
    value = field.get_default(call_default_factory=True)
    return "" if value in (None, "", [], {}) else f"`{value}`"


def _limit(limit: Any) -> str:
    if isinstance(limit, Ge):
        return f"at least {limit.ge}"
    return f"above {limit.gt}" if isinstance(limit, Gt) else f"at most {limit.le}"


def _words(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Annotated, typing.Union, types.UnionType):
        return _words(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin is list:
        return {"text": "list of texts", "integer": "list of integers"}.get(_words(arguments[0]), "list of mappings")
    if isinstance(annotation, type) and issubclass(annotation, FileModel):
        return "mapping"
    return _WORDS[origin or annotation]


def render() -> str:
    """Return the page with today's tables. Raises KeyError for a comment that names no model."""
    return _TABLE.sub(lambda found: found[1] + table(MODELS[found[2]]), PAGE.read_text(encoding="utf-8"))


def main() -> int:
    """Rewrite the page; with ``--check`` only report (exit status 1) that it is out of date."""
    return write_or_check(__doc__, PAGE, render(), mistake="does not show the keys of the files", module=__spec__.name)


if __name__ == "__main__":
    sys.exit(main())
