"""``--config`` and ``--dump-config``: the flags of a run in one YAML file; and the resolved configuration."""

from __future__ import annotations

import json
from argparse import Action
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from slime.arguments.args import Args
from slime.arguments.command_line import all_flags
from slime.arguments.diagnostics import FINDINGS
from slime.arguments.errors import ArgumentError
from slime.arguments.files import custom_config, yaml_source
from slime.arguments.files.flag_values import FlagNames, read_flags
from slime.arguments.files.schema import unknown_key
from slime.arguments.files.yaml_source import Document, KeyPath, seen
from slime.arguments.flag import KIND_WORDS, Flag
from slime.arguments.groups import slime_flags
from slime.arguments.passthrough import megatron
from slime.utils.atomic_file import write_atomically
from slime.utils.plain import plain
from slime.utils.secrets import MASK, is_secret, mask_text

OPTION = "--config"
OWN_FLAGS = frozenset(flag.dest for flag in slime_flags() if not flag.traits.saved)
"""Words that concern one call and are no part of a configuration."""
SECTIONS = ("versions", "arguments", "defaults", "derived")


@dataclass(frozen=True)
class RunConfig:
    """A file's contents: attributes that count as given, defaults that are not slime's, and derived attributes.

    ``warnings``: what is to be said about it.
    """

    given: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    derived: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


def read(path: str, flags: Sequence[Flag], own: Mapping[str, Action] | None = None) -> RunConfig:
    """The contents of ``path``: what ``write`` has written, or a mapping of flags to values made by hand.

    Values are typed and checked as on the command line. ``own`` are the flags that a user's own code adds, by
    attribute: of these only numbers and choices are checked. Raises ``ArgumentError`` for all mistakes at once.
    """
    own = own or {}
    document = yaml_source.read(path, OPTION)
    # What a run directory holds and ``--dry-run`` prints looks alike, but hides what was given.
    if "explicit_flags" in document.data or "explicit_flags" in (document.value(("derived",)) or {}):
        raise ArgumentError(
            f"{OPTION} {document.path}: this is a resolved configuration, in which given and derived values are mixed; "
            "start from a file that --dump-config has written (the command.txt of a run directory has the command line)"
        )
    names = FlagNames.of(flag for flag in flags if flag.dest not in OWN_FLAGS)
    if not any(section in document.data for section in SECTIONS):
        given = _values(document, (), names, own)
        document.check()
        return RunConfig(given=given, warnings=tuple(document.warnings))
    for name in document.data:
        if name not in SECTIONS:
            inside = isinstance(name, str) and names.find(name) is not None
            document.note((name,), "flags belong below `arguments:`" if inside else unknown_key(str(name), SECTIONS))
        elif not isinstance(document.data[name], dict | None):
            document.note((name,), f"expected a mapping (`name: value` lines), got {seen(document.data[name])}")
            document.data[name] = None
    given = _values(document, ("arguments",), names, own)
    defaults = _values(document, ("defaults",), names, own)
    document.check()
    same = {flag.dest for flag in flags if flag.dest in defaults and defaults[flag.dest] == flag.default}
    changed = {name: value for name, value in defaults.items() if name not in same}
    return RunConfig(given, changed, document.data.get("derived") or {}, tuple(document.warnings))


def _values(document: Document, at: KeyPath, names: FlagNames, own: Mapping[str, Action]) -> dict[str, Any]:
    found, others = read_flags(document, at, names)
    for name, place in others.items():
        attribute = name.lstrip("-").replace("-", "_")
        if attribute in own and attribute not in OWN_FLAGS:
            found[attribute] = _own_value(document, place, own[attribute])
        elif attribute == "config":
            document.note(place, "a configuration file cannot name another one; copy its lines")
        elif attribute in OWN_FLAGS:
            document.note(place, "belongs on the command line, not in the file")
        else:
            document.note(place, names.unknown(name))
    return found


def _own_value(document: Document, place: KeyPath, action: Action) -> Any:
    value, text = document.value(place), document.text(place)
    if action.type in (int, float) and action.nargs is None and value is not None:
        try:
            value = action.type(text or "")
        except ValueError:
            expected = KIND_WORDS["int" if action.type is int else "float"]
            document.note(place, f"expected {expected}, got {seen(value, text)}")
    if action.choices is not None and action.nargs is None and value is not None and value not in action.choices:
        document.note(place, f"expected one of {', '.join(map(str, action.choices))}, got {seen(value, text)}")
    return value


def snapshot(args: Args) -> dict[str, Any]:
    """The attributes as they are now; taken before the rules change them."""
    return {
        name: deepcopy(value) if isinstance(value, list | dict) else value
        for name, value in vars(args).items()
        if name not in FINDINGS
    }


def replaced(args: Args, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that were given and are others now, by attribute; ``before`` is the ``snapshot``."""
    return {
        name: before[name] for name in sorted(args.explicit_flags) if not _same(before[name], getattr(args, name, None))
    }


def write(args: Args, before: Mapping[str, Any], path: str) -> None:
    """Write a file to ``path`` from which ``--config`` starts the same run; an existing one is replaced.

    ``before`` is the ``snapshot`` of ``args`` from before the rules. Secrets are left out. Raises ``ArgumentError``
    when the file cannot be written.
    """
    import slime
    from slime.observability.run_dir import package_versions

    flags = {flag.dest: flag for flag in all_flags() if flag.dest not in OWN_FLAGS}
    hidden: list[str] = []
    plugins = custom_config.own_names(args.custom_config_path, flags.values())  # that file is read again
    given = {name: before[name] for name in sorted(args.explicit_flags - OWN_FLAGS - plugins)}
    defaults = {name: before[name] for name, f in flags.items() if f.source == "slime" and name not in given}
    content = {
        "versions": {"slime": slime.__version__, "packages": package_versions()},
        "arguments": {name: _written(name, value, flags.get(name), hidden) for name, value in given.items()},
        "defaults": {name: _written(name, value, flags[name], hidden) for name, value in defaults.items()},
        "derived": derived(args, before),
    }
    for section in ("arguments", "defaults"):
        content[section] = {name: value for name, value in content[section].items() if name not in hidden}
    opening = [
        "# The flags of a run. Start the same run with `--config` and this file; flags on the command line win.",
        "# arguments: what was given. defaults: every other flag of slime. derived: what follows, only compared.",
    ]
    if hidden:
        opening.append(f"# Secrets are not written; give them again: {', '.join(hidden)}.")
    try:
        write_atomically(path, "\n".join([*opening, yaml_source.dump(content)]))
    except OSError as error:
        raise ArgumentError(f"--dump-config {error.strerror}") from error


def derived(args: Args, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the rules made of the flags: every attribute that is not as it was in ``before``, as plain data."""
    skipped = {*FINDINGS, *OWN_FLAGS, "explicit_flags", "replaced_values", "role_values", *megatron.aliases().values()}
    changed = [
        name
        for name, value in sorted(vars(args).items())
        if name not in skipped and not (name in before and _same(before[name], value))
    ]
    return {name: plain(name, getattr(args, name)) for name in changed if not is_secret(name)}


def differences(args: Args, before: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return what the rules derive now and not when the file was written: a checkpoint appeared, for example."""
    if not config.derived:
        return []
    now = derived(args, before)
    found = []
    for name in sorted({*now, *config.derived}):
        was = config.derived[name] if name in config.derived else plain(name, before.get(name))
        value = plain(name, getattr(args, name, None))
        if not _same(was, value):
            found.append(f"{OPTION} {args.config}: {name} was {was!r} when the file was written, and is {value!r} now")
    return found


def _same(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)  # nan is not equal to itself


def _written(name: str, value: object, flag: Flag | None, hidden: list[str]) -> Any:
    """``value`` as ``read`` understands it; the names of secrets are added to ``hidden``."""
    value = _without_secrets(name, name, value, hidden)
    if flag is not None and flag.kind == "json" and isinstance(value, str):
        return json.dumps(value)
    return plain(name, value)


def _without_secrets(name: str, place: str, value: object, hidden: list[str]) -> Any:
    """``value`` without the entries that are secret; None, with ``place`` in ``hidden``, when all of it is."""
    if isinstance(value, Mapping) and not is_secret(name):
        left = {key: _without_secrets(str(key), f"{key} in {place}", item, hidden) for key, item in value.items()}
        return {key: item for key, item in left.items() if item is not None or value[key] is None}
    if _is_or_holds_secret(name, value):
        hidden.append(place)
        return None
    return value


def _is_or_holds_secret(name: str, value: object) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and any(is_secret(name) or _is_or_holds_secret(str(k), v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return any(_is_or_holds_secret(name, item) for item in value)
    return (value is not None and plain(name, value) == MASK) or (
        isinstance(value, str) and mask_text(value, name) != value
    )


# The resolved configuration as data and as YAML


def dump(args: Args) -> dict[str, dict[str, Any]]:
    """``group -> attribute -> value``: plain data, secrets masked, derived attributes under ``derived``.

    Of Megatron, SGLang and the router only what differs from the default is listed.
    """
    found: dict[str, dict[str, Any]] = {}
    seen = set()
    for flag in all_flags():
        seen.add(flag.dest)
        if not hasattr(args, flag.dest):
            continue
        value = getattr(args, flag.dest)
        if flag.source == "slime" or value != flag.default:
            found.setdefault(flag.group, {})[flag.dest] = plain(flag.dest, value)
    others = sorted(vars(args).keys() - seen - set(FINDINGS))
    derived = {name: plain(name, getattr(args, name)) for name in others}
    return {**found, "derived": derived}


def to_yaml(args: Args) -> str:
    """``dump`` as YAML text."""
    return yaml_source.dump(dump(args))
