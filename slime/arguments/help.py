"""``--help``: slime's flags by group; ``--help WORD`` searches every source, ``--help --FLAG`` describes one."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.arguments.availability import is_available, refused_values
from slime.arguments.flag import KIND_WORDS, Flag, Kind
from slime.arguments.traits import UNSET, Needs

OPENING = """usage: train.py FLAGS
       train_async.py FLAGS

Reinforcement learning of language models: Megatron trains, SGLang generates, Ray places."""
NEEDS = (
    "A run needs a model (--hf-checkpoint, whose config.json describes it), prompts (--prompt-data) and a reward "
    "(--rm-type), sizes (--rollout-batch-size, --global-batch-size), slots (--actor-num-gpus-per-node, and --colocate "
    "or --rollout-num-gpus) and an end (--num-rollout or --num-epoch)."
)
WAYS = """\
  --help GROUP    the flags of a group, and others that mention the word
  --help WORD     the same for any word, among slime's, Megatron's, SGLang's and the router's flags
  --help --FLAG   everything about one flag
  --help all      every flag
  --dry-run       check a command line and show what it would do; nothing is started
Values may also stand in a YAML file (--config FILE); flags on the command line win over it."""
PASSED = {
    "megatron": "flags of megatron-core, spelled as Megatron-LM spells them",
    "sglang": "flags of the SGLang server with the prefix --sglang-",
    "router": "flags of sglang-router, --router-*",
}
_PLACEHOLDERS = {"file": "FILE", "directory": "DIR", "model": "DIR"}
NARROWEST, WIDEST = 40, 120
MOST_MENTIONED = 40
_KINDS: dict[Any, Kind] = {int: "int", float: "float"}


def form(flag: Flag) -> str:
    """Return the flag as it is written: ``--x N``, ``--x {a,b}``, ``--x / --no-x``."""
    if flag.action == "tristate":
        return " / ".join(flag.options)
    if flag.action in ("true", "false"):
        return ", ".join(flag.options)
    word = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else _placeholder(flag)
    if flag.nargs in ("+", "*"):
        word += " ..."
    return f"{', '.join(flag.options)} {word}"


def _placeholder(flag: Flag) -> str:
    """Return the placeholder of the value: ``N``, ``FILE``, ..."""
    if flag.kind not in ("str", "nullable_str"):
        return {"int": "N", "human_int": "N", "float": "X", "json": "JSON", "layout": "N|LIST"}[flag.kind]
    if flag.source != "slime":
        return "TEXT"
    if flag.traits.path is not None:
        return _PLACEHOLDERS[flag.traits.path]
    return "PACKAGE.NAME" if flag.traits.hook is not None or flag.dest.endswith("_path") else "TEXT"


def default_text(flag: Flag) -> str:
    """Return what happens without the flag, in words; empty when the description says it."""
    if flag.required:
        return "required"
    if flag.action in ("true", "false"):
        return f"sets {flag.dest} to {flag.action == 'true'}" if flag.action == "false" else ""
    if flag.default is None or flag.default in ([], {}):
        return ""
    value = flag.default if isinstance(flag.default, str) else json.dumps(flag.default, default=str)
    return f"default: {value.removesuffix('.0') if isinstance(flag.default, float) else value}"


def status_text(flag: Flag) -> str:
    """That the flag, or some of its values, can have no effect or are not available yet; empty when all is well."""
    if flag.traits.inert:
        return "without effect"
    if not is_available(flag):
        return "not available yet"
    refused = refused_values(flag)
    return f"not available yet: {', '.join(map(str, refused))}" if refused else ""


def custom_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag]) -> list[Flag]:
    """A user's own ``add_argument`` calls as flags, for the help."""
    known = {option for flag in flags for option in flag.options}
    defaults: dict[str, Any] = getattr(parser, "custom_defaults", {})
    required: dict[str, str] = getattr(parser, "custom_required", {})
    return [
        Flag(
            dest=action.dest,
            options=tuple(action.option_strings),
            default=defaults.get(action.dest),
            kind=_KINDS.get(action.type, "str"),
            action="true" if action.nargs == 0 else "value",
            nargs=action.nargs if action.nargs in ("+", "*") else None,
            choices=tuple(action.choices) if action.choices is not None else None,
            required=action.dest in required,
            help="" if action.help in (None, argparse.SUPPRESS) else str(action.help),
            group="added by add_custom_arguments",
        )
        for action in parser._actions
        if action.option_strings and not known.intersection(action.option_strings)
    ]


def help_text(flags: Sequence[Flag], topic: str | None = None, width: int | None = None) -> str:
    """The text of ``--help`` (``topic`` None), of ``--help all``, of ``--help WORD`` or of ``--help --FLAG``.

    ``width`` in columns; default: that of the terminal. Several words in ``topic`` must all match.
    """
    width = max(width or min(shutil.get_terminal_size((110, 24)).columns, WIDEST), NARROWEST)
    if topic is None:
        return _overview(flags, width)
    if topic == "all":
        return "\n".join([f"{len(flags)} flags", *_sections(flags, width)])
    if topic in PASSED:
        shown = [flag for flag in flags if flag.source == topic]
        return "\n".join([f"{len(shown)} {PASSED[topic]}", *_sections(shown, width)])
    found = find(flags, topic)
    if found.flag is not None:
        return _all_about(flags, found.flag, width)
    if found == Found():
        close = nearest(flags, topic)
        return f"no flag mentions {topic!r}" + (f"; the nearest are {', '.join(close)}" if close else "")
    return "\n".join(_results(flags, found, topic, width))


def _overview(flags: Sequence[Flag], width: int) -> str:
    shown = [flag for flag in flags if flag.source == "slime"]
    groups = ", ".join(dict.fromkeys(flag.group for flag in shown))
    packages = [
        f"  --help {source:9}{sum(flag.source == source for flag in flags)} {words}" for source, words in PASSED.items()
    ]
    opening = [line for text in OPENING.splitlines() for line in _wrapped(text, width, 0) or [""]]
    ways = [line for text in (*packages, *WAYS.splitlines()) for line in _hanging(text, width)]
    index = [*_wrapped(f"groups: {groups}", width, 2), *ways, "", *_wrapped(NEEDS, width, 0)]
    return "\n".join([*opening, *_sections(shown, width), "", *index])


def _results(flags: Sequence[Flag], found: Found, topic: str, width: int) -> list[str]:
    """Groups of that name in full, then flags named so, then the names of those that only mention the word."""
    members = [flag for flag in flags if flag.group in found.groups]
    lines = _sections(members, width) if members else []
    if found.named:
        title = f"{'other ' if members else ''}flags with {topic!r} in their name"
        lines += ["", *_wrapped(f"{title}:", width, 2), *(line for flag in found.named for line in _entry(flag, width))]
    if found.mentioning and not members and not found.named:
        lines += _sections(found.mentioning, width)
    elif found.mentioning:
        names = [flag.option for flag in found.mentioning]
        more = f" and {len(names) - MOST_MENTIONED} more" if len(names) > MOST_MENTIONED else ""
        lines += ["", f"mentioned by {len(names)} {'other' if len(names) == 1 else 'others'}:"]
        lines += _wrapped("  " + ", ".join(names[:MOST_MENTIONED]) + more, width, 2)
    return lines[1:]


def _sections(flags: Sequence[Flag], width: int) -> list[str]:
    groups: dict[str, list[Flag]] = {}
    for flag in flags:
        groups.setdefault(flag.group, []).append(flag)
    lines = []
    for title, members in groups.items():
        lines += ["", f"{title}:"]
        for flag in members:
            lines += _entry(flag, width)
    return lines


def _entry(flag: Flag, width: int) -> list[str]:
    default = "" if flag.action == "false" else default_text(flag)  # what a switch does is its description
    noted = "; ".join(note for note in (default, status_text(flag)) if note)
    text = " ".join(part for part in (flag.help, f"({noted})" if noted else "") if part)
    if flag.kind == "layout":
        text += f" [{KIND_WORDS['layout']}]"
    return [*_wrapped(f"  {form(flag)}", width, 6), *_wrapped(" " * 6 + text, width, 6)]


def _all_about(flags: Sequence[Flag], flag: Flag, width: int) -> str:
    facts = {
        "value": _value_words(flag),
        "default": _default_words(flag),
        "attribute": f"args.{flag.dest}",
        "YAML": f"{flag.dest}: {_yaml_example(flag)}   (--config FILE)",
        "group": flag.group,
        **trait_words(flag),
        "status": _status_words(flag),
    }
    lines = [*_wrapped(form(flag), width, 4), *_wrapped(f"    {flag.help}", width, 4), ""]
    for name, words in facts.items():
        lines += _wrapped(f"  {name:11}{words}", width, 13) if words else []
    near = related(flags, flag)
    if near:
        lines += ["", "related:", *(line for other in near for line in _entry(other, width))]
    return "\n".join(lines)


def _value_words(flag: Flag) -> str:
    if flag.action in ("true", "false"):
        return "none: it is a switch"
    if flag.action == "tristate":
        return "none: it is a pair of switches"
    words = f"one of {', '.join(map(str, flag.choices))}" if flag.choices else KIND_WORDS[flag.kind]
    if limits := _limits(flag):
        words += f", {limits}"
    if flag.nargs in ("+", "*"):
        words += "; several values may follow"
    return words + ("; may be repeated" if flag.action == "append" else "")


def _limits(flag: Flag) -> str:
    """Return what pydantic's constraints allow, in words."""
    from slime.arguments.groups import ALL_GROUPS

    declared = [group.model_fields[flag.dest] for group in ALL_GROUPS if flag.dest in group.model_fields]
    if flag.source != "slime" or not declared:
        return ""
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(limit, name)}"
        for name, word in words.items()
        for limit in declared[0].metadata
        if getattr(limit, name, None) is not None
    ]
    return " and ".join(found)


def _default_words(flag: Flag) -> str:
    if flag.required:
        return "none: it must be given"
    if flag.action == "false":
        return f"{flag.dest} is true; the flag makes it false"
    if flag.action == "true":
        return "off"
    return default_text(flag).removeprefix("default: ") or "not set"


def _yaml_example(flag: Flag) -> str:
    if flag.action in ("true", "tristate"):
        return "true"
    if flag.action == "false":
        return "false"
    if flag.default not in (None, [], {}):
        return json.dumps(flag.default, default=str)
    example = {"int": "1", "human_int": "1", "float": "1.0", "json": "{...}", "layout": "[0, 1]"}.get(flag.kind, "TEXT")
    return f"[{example}]" if flag.nargs in ("+", "*") or flag.action == "append" else example


def trait_words(flag: Flag) -> dict[str, str]:
    """Return what the traits of ``flag`` say to its user, by subject; empty words where there is nothing to say."""
    traits = flag.traits
    readers = {"trainers": "the trainers", "run": "the driver, the rollout manager or engines; no role has its own"}
    needed = traits.needs.option if isinstance(traits.needs, Needs) else traits.needs
    set_by = [f"--{traits.follows.replace('_', '-')}, unless it is given"] if traits.follows else []
    set_by += [f"slime.arguments.rules.{traits.resolved_by}, unless it is given"] if traits.resolved_by else []
    if traits.critic is not UNSET:
        set_by.append(f"slime for the critic: {traits.critic!r}")
    if traits.without_gpu is not None:
        always = " unless it is given" if traits.without_gpu.given_holds else ""
        set_by.append(f"slime on a machine without GPUs: {traits.without_gpu.value!r}{always}")
    return {
        "read by": readers[traits.read_by] if traits.read_by else "",
        "called as": traits.hook.call if traits.hook else "",
        "fills in": ", ".join(f"{{{name}}}" for name in traits.template.names) if traits.template else "",
        "needs": needed or "",
        "set by": "; ".join(set_by),
        "resume": "groups that are not trained yet are generated again after a change" * traits.decides_generation,
    }


def _status_words(flag: Flag) -> str:
    if flag.traits.inert:
        return f"without effect: {flag.traits.inert}"
    words = status_text(flag)
    return f"{words}; --dry-run checks it all the same" if words else ""


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(), width, initial_indent=lead, subsequent_indent=" " * indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _hanging(text: str, width: int) -> list[str]:
    """A line of two columns; what does not fit goes below the second one."""
    if not text.startswith("  "):
        return textwrap.wrap(text, width)
    name, words = text[:18], text[18:]
    return textwrap.wrap(words, width, initial_indent=name, subsequent_indent=" " * 18, break_on_hyphens=False)


MOST_RELATED = 8


@dataclass(frozen=True)
class Found:
    """Result of a search: one ``flag``; or whole ``groups``, flags ``named`` so and flags that only ``mention`` it."""

    flag: Flag | None = None
    groups: tuple[str, ...] = ()
    named: tuple[Flag, ...] = ()
    mentioning: tuple[Flag, ...] = ()


def find(flags: Sequence[Flag], topic: str) -> Found:
    """Search ``flags`` for ``topic``: with dashes in front the flag of that name, else words that all must match.

    A word matches where a word starts with it; only when nothing is found that way, anywhere.
    """
    exact = option_of(flags, topic)
    if exact is not None:
        return Found(flag=exact)
    words = [re.escape(word) for word in _normal(topic).split()]
    return _matching(flags, [rf"\b{word}" for word in words]) or _matching(flags, words) or Found()


def option_of(flags: Sequence[Flag], topic: str) -> Flag | None:
    """The flag with the spelling ``topic``; dashes and underscores are the same, and without dashes it must have two
    words, so that ``--help rollout`` and ``--help seed`` are searches."""
    stem = _normal(topic)
    if not topic.startswith("-") and "-" not in stem:
        return None
    return next((flag for flag in flags for option in flag.options if _normal(option) == stem), None)


def nearest(flags: Sequence[Flag], topic: str, most: int = 5) -> list[str]:
    """Spellings of flags, and titles of groups, that look like ``topic``."""
    stem = _normal(topic)
    names = {_normal(option): option for flag in flags for option in flag.options}
    names |= {_normal(flag.group): flag.group for flag in flags}
    by_word: dict[str, str] = {}
    for name, shown in names.items():
        for word in name.split("-"):
            by_word.setdefault(word, shown)
    close = [names[name] for name in difflib.get_close_matches(stem, list(names), n=most, cutoff=0.6)]
    close += [by_word[word] for word in difflib.get_close_matches(stem, list(by_word), n=most, cutoff=0.75)]
    return list(dict.fromkeys(close))[:most]


def related(flags: Sequence[Flag], flag: Flag) -> list[Flag]:
    """Flags that ``flag`` mentions or that mention it, then others of its group."""
    others = [other for other in flags if other is not flag]
    tied = [other for other in others if _mentions(flag, other) or _mentions(other, flag)]
    return [*tied, *(other for other in others if other.group == flag.group and other not in tied)][:MOST_RELATED]


def _matching(flags: Sequence[Flag], patterns: list[str]) -> Found | None:
    def matches(text: str) -> bool:
        return all(re.search(pattern, text) for pattern in patterns)

    groups = tuple(title for title in dict.fromkeys(f.group for f in flags) if matches(_normal(title, " ")))
    rest = [flag for flag in flags if flag.group not in groups]
    named = tuple(flag for flag in rest if matches(" ".join(map(_normal, (*flag.options, flag.dest)))))
    mentioning = tuple(
        flag
        for flag in rest
        if flag not in named
        and matches(_normal(" ".join((*flag.options, flag.dest, flag.help, flag.group, flag.source)), " "))
    )
    return Found(groups=groups, named=named, mentioning=mentioning) if groups or named or mentioning else None


def _normal(text: str, joint: str = "-") -> str:
    text = text.lower().lstrip("-").replace("_", "-")
    return text if joint == "-" else text.replace("-", joint) + " " + text


def _mentions(flag: Flag, other: Flag) -> bool:
    return any(
        option in flag.help and re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", flag.help)
        for option in other.options
    )
