"""Environments that agents act in: ``--environment-config`` (YAML) and ``--environment-path``."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import Field

from slime.arguments.args import Args
from slime.arguments.files.schema import Count, FileModel, Number, check_unique, validate
from slime.arguments.files.yaml_source import KeyPath
from slime.arguments.files.yaml_source import read as read_yaml
from slime.arguments.group import DottedPath

OPTION = "--environment-config"


class Difficulty(FileModel):
    """Difficulty of new tasks, which follows the success of the latest ones."""

    levels: Count = Field(ge=1, description="difficulties are 0 to this, less one")
    start: Count = Field(default=0, ge=0, description="difficulty of the first tasks")
    window: Count = Field(default=64, ge=1, description="episodes at the present difficulty that are looked at")
    raise_at: Number = Field(default=0.8, gt=0, le=1, description="share of successes from which it gets harder")
    lower_at: Number = Field(default=0.2, ge=0, le=1, description="share of successes up to which it gets easier")


class McpServer(FileModel):
    """A server of the Model Context Protocol whose tools an environment has; it talks on standard input and output."""

    command: str = Field(min_length=1, description="program")
    args: list[str] = Field(default=[], description="its arguments")
    env: dict[str, str] | None = Field(default=None, description="environment variables of its own")


class EnvironmentEntry(FileModel):
    """One entry of ``environments``."""

    path: DottedPath = Field(description="dotted path of the class")
    name: str = Field(default="", description="name in data, metrics and messages; default: that of the class")
    weight: Number = Field(default=1.0, ge=0, description="how often its tasks are drawn, relative to the others")
    max_turns: Count = Field(default=16, ge=1, description="turns of an episode at most")
    step_timeout: Number = Field(default=60.0, gt=0, description="seconds for reset and for each step")
    success_reward: Number = Field(default=1.0, description="an episode with at least this reward is a success")
    difficulty: Difficulty | None = Field(default=None, description="levels of difficulty, and when they change")
    mcp_servers: list[McpServer] = Field(default=[], description="servers whose tools a `ToolEnvironment` has too")
    options: dict[str, Any] = Field(default={}, description="anything that the class reads as `task.options`")


class EnvironmentFile(FileModel):
    """The file."""

    environments: list[EnvironmentEntry] = Field(min_length=1, description="list of environments")


@cache
def read(path: str) -> dict[str, EnvironmentEntry]:
    """The environments of the file ``path`` by name. Raises ``ArgumentError`` for all mistakes at once."""
    document = read_yaml(path, OPTION)
    found = validate(document, EnvironmentFile)
    entries = [_named(entry) for entry in found.environments] if found is not None else []
    names: list[tuple[KeyPath, str]] = [(("environments", i, "name"), one.name) for i, one in enumerate(entries)]
    check_unique(document, names)
    if entries and not any(entry.weight for entry in entries):
        document.note(("environments",), "every weight is 0, so there is nothing to draw; give one a weight above 0")
    for number, entry in enumerate(entries):
        bounds = entry.difficulty
        if bounds is not None and bounds.start >= bounds.levels:
            at: KeyPath = ("environments", number, "difficulty", "start")
            document.note(at, f"expected less than levels, which is {bounds.levels}, got {bounds.start}")
        if bounds is not None and bounds.lower_at >= bounds.raise_at:
            at = ("environments", number, "difficulty", "lower_at")
            document.note(at, f"expected less than raise_at, which is {bounds.raise_at:g}, got {bounds.lower_at:g}")
    document.check()
    return {entry.name: entry for entry in entries}


def environments_of(args: Args) -> dict[str, EnvironmentEntry]:
    """The environments of a run by name; none without ``--environment-config`` and ``--environment-path``."""
    if args.environment_config is not None:
        return read(args.environment_config)
    entries = [_named(EnvironmentEntry(path=path)) for path in args.environment_path or ()]
    return {entry.name: entry for entry in entries}


def _named(entry: EnvironmentEntry) -> EnvironmentEntry:
    return entry.model_copy(update={"name": entry.name or entry.path.rpartition(".")[2]})
