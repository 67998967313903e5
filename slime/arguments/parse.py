"""``parse_args``: the command line, checked and derived, as one flat namespace."""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from slime.arguments import diagnostics, older_flags
from slime.arguments.args import Args
from slime.arguments.availability import inert_messages, unavailable_messages
from slime.arguments.command_line import AddCustomArguments, all_flags, build_parser, read_words, repeated_messages
from slime.arguments.errors import ArgumentError
from slime.arguments.files import custom_config
from slime.arguments.flag import Flag
from slime.arguments.group import flags_of, validation_reason
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.passthrough import megatron
from slime.utils.secrets import mask_words

HELP = ("-h", "--help")
CUSTOM_ARGUMENTS = "--custom-arguments-path"
CUSTOM_ARGUMENTS_VARIABLE = "SLIME_CUSTOM_ARGUMENTS_PATH"
DRY_RUN = "slime.preflight.plan.render.plan_text"
"""Answers ``--dry-run``: by path, as the planner is a layer above, and only a dry run loads it."""


def parse_args(
    argv: Sequence[str] | None = None,
    add_custom_arguments: AddCustomArguments | None = None,
    *,
    look: Callable[..., Any] | None = None,
    serve: bool = False,
    log_probs: bool = False,
) -> Args:
    """Parse, check and derive. ``argv`` None reads ``sys.argv``.

    ``add_custom_arguments(parser)`` may add a user's own flags. On a wrong command line: a message on stderr and exit
    status 2 when ``sys.argv`` is read, an ``ArgumentError`` when ``argv`` is given. ``--help [WORD]`` and
    ``--dry-run`` print and exit with status 0.
    ``serve``: the command line is that of ``slime serve``; ``log_probs``: of the log-prob server.
    ``look(args, dry_run=True)`` returns what a dry run finds beyond the flags (``slime.preflight.look.Findings``).
    ``args.explicit_flags`` (a frozenset of attributes) says what was given on the command line,
    ``args.replaced_values`` (by attribute) what was given and then replaced by a rule.
    """
    if callable(argv):  # slime <= 0.3.1 takes add_custom_arguments first
        argv, add_custom_arguments = None, argv
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        flags = all_flags()
        parser = build_parser(flags, _custom_arguments(words, add_custom_arguments))
        _answer_help(words, flags, parser)
        args = resolve(words, flags, parser, serve=serve, log_probs=log_probs)
        if args.dry_run:
            _answer_dry_run(args, look)
    except ArgumentError as error:
        if argv is not None:
            raise
        exit_with(error)
    for warning in args.warnings:
        print(f"{_program()}: warning: {warning}", file=sys.stderr)
    diagnostics.end(args)
    return args


def resolve(
    words: Sequence[str],
    flags: Sequence[Flag],
    parser: argparse.ArgumentParser,
    *,
    serve: bool = False,
    log_probs: bool = False,
) -> Args:
    """Read ``words`` with ``parser``, fill defaults, apply every rule. Raises ``ArgumentError``.

    What is found on the way is on the namespace, in the lists of ``diagnostics``.
    """
    from slime.arguments.files import run_config
    from slime.arguments.rules import apply_rules

    current = older_flags.translate(words, parser)
    typed, ignored = read_words(parser, current.words, ignore_unknown="--ignore-unknown-flags" in words)
    own = {action.dest: action for action in parser._actions}
    file = run_config.read(typed["config"], flags, own) if typed.get("config") else run_config.RunConfig()
    given = {**file.given, **typed}
    notes = [*current.notes, *file.warnings]
    given |= custom_config.read(given.get("custom_config_path"), flags, notes.append)
    changed = {**parser.custom_defaults, **file.defaults, **given}  # type: ignore[attr-defined]
    args = Args(**{flag.dest: copy.copy(flag.default) for flag in flags})
    for name, value in changed.items():
        setattr(args, name, value)
    args.serve_only, args.log_probs_only = serve, log_probs
    diagnostics.begin(args)
    stand_ins = {"hf_checkpoint": "HF_CHECKPOINT", "rollout_batch_size": changed.get("global_batch_size") or 1}
    for flag in flags:
        if flag.required and flag.dest not in changed:
            diagnostics.missing_flag(args, flag.dest, f"missing: {flag.option} ({flag.help})", stand_ins[flag.dest])
    for dest, option in parser.custom_required.items():  # type: ignore[attr-defined]
        if dest not in given:
            diagnostics.missing_flag(args, dest, f"missing: {option} (added by add_custom_arguments)")
    for note in [*notes, *repeated_messages(parser, current.words)]:
        diagnostics.warn(args, note)
    if ignored:
        diagnostics.warn(args, f"unknown words are ignored: {' '.join(mask_words(ignored))}")
    for message in custom_config.look_alikes(args.custom_config_path, given.keys() - own.keys(), flags):
        diagnostics.warn(args, message)
    for warning in megatron.warnings():
        diagnostics.warn(args, warning)
    _check_availability(args, changed, flags, current.refused)
    _check_groups(args, changed)
    args.explicit_flags = frozenset(given)
    for name, value in megatron.config_defaults().items():
        setattr(args, name, value)
    before = run_config.snapshot(args)
    try:
        apply_rules(args)
    except OSError as error:
        raise ArgumentError(_about_path(args, flags, error)) from error
    args.replaced_values = run_config.replaced(args, before)
    if file.given and not set(typed) - run_config.OWN_FLAGS:
        for difference in run_config.differences(args, before, file):
            diagnostics.warn(args, difference)
    if args.dump_config is not None:
        try:
            run_config.write(args, before, args.dump_config)
        except OSError as error:
            raise ArgumentError(f"--dump-config {args.dump_config}: {error.strerror or error}") from error
    return args


def _about_path(args: Args, flags: Sequence[Flag], error: OSError) -> str:
    """Return what is wrong with a path, and the flags that name it."""
    path = str(error.filename or "")
    values = ((flag.option, vars(args).get(flag.dest)) for flag in flags)
    named = [f"{option} {value}" for option, value in values if isinstance(value, str) and value and value in path]
    return f"{', '.join(named) or path or 'a path'}: cannot be looked at: {error.strerror or error}"


def _check_availability(args: Args, given: dict[str, Any], flags: Sequence[Flag], refused: Sequence[str]) -> None:
    """Refuse features that do not exist (yet), in a dry run keep them; warn of flags without effect.

    ``refused``: sentences about flags of older releases.
    """
    for message in inert_messages(given, flags):
        diagnostics.warn(args, message)
    args.not_available = [*refused, *unavailable_messages(given, flags)]
    if args.not_available and not args.dry_run:
        raise ArgumentError("\n".join(args.not_available))


def _answer_dry_run(args: Args, look: Callable[..., Any] | None) -> NoReturn:
    if look is not None:
        found = look(args, dry_run=True)
        if found.errors:
            raise ArgumentError("\n".join(found.errors))
        args.warnings += found.warnings
        args.unchecked += found.unchecked
    module, _, function = DRY_RUN.rpartition(".")
    _print(getattr(import_module(module), function)(args))
    sys.exit(0)


def _check_groups(args: Args, given: dict[str, Any]) -> None:
    """Let every group's model check and convert what was given; all mistakes are reported at once."""
    messages: list[str] = []
    for group in ALL_GROUPS:
        names = [name for name in group.model_fields if name in given or name in args]
        try:
            model = group.model_validate({name: given[name] for name in names if name in given})
        except ValidationError as error:
            options = {flag.dest: flag.option for flag in flags_of(group)}
            for detail in error.errors():
                name = str(detail["loc"][0])
                messages.append(f"{options.get(name, name)}: {validation_reason(detail)}")
            continue
        for name in model.model_fields_set:
            setattr(args, name, getattr(model, name))
    if messages:
        raise ArgumentError("\n".join(messages))


def _answer_help(words: Sequence[str], flags: Sequence[Flag], parser: argparse.ArgumentParser) -> None:
    place = next((i for i, word in enumerate(words) if word in HELP or word.startswith("--help=")), None)
    if place is None:
        return
    from slime.arguments.help import custom_flags, help_text

    _, _, joined = words[place].partition("=")
    following = [joined] if joined else [word for word in words[place + 1 :] if word not in HELP]
    plain = list(itertools.takewhile(lambda word: not word.startswith("-"), following))
    topic = " ".join(plain or following[:1]) or None
    _print(help_text([*flags, *custom_flags(parser, flags)], topic))
    sys.exit(0)


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `--help | head`: the rest is not read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (stays open until the process ends)


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "slime.arguments" if name in ("__main__.py", "-c", "") else name


def exit_with(error: ArgumentError) -> NoReturn:
    """Print what is wrong with the command line, and exit with status 2."""
    for line in str(error).splitlines():
        print(f"{_program()}: error: {line}", file=sys.stderr)
    print("`--help WORD` lists the flags that mention WORD.", file=sys.stderr)
    sys.exit(2)


def _custom_arguments(words: Sequence[str], given: AddCustomArguments | None) -> AddCustomArguments | None:
    """The function ``given`` by the caller and then that of ``--custom-arguments-path`` or its variable, as one.

    None without either. Raises ``ArgumentError`` for a path that cannot be loaded.
    """
    path, source = _custom_arguments_path(words)
    functions = [
        function for function in (given, _load_custom_arguments(path, source) if path else None) if function is not None
    ]
    if len(functions) < 2:
        return functions[0] if functions else None

    def both(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for function in functions:
            parser = function(parser) or parser
        return parser

    return both


def _custom_arguments_path(words: Sequence[str]) -> tuple[str | None, str]:
    """The dotted path and where it was said; it is needed before there is a parser that could read the words."""
    if path := _value_of(CUSTOM_ARGUMENTS, words):
        return path, CUSTOM_ARGUMENTS
    if (file := _value_of("--config", words)) and (path := _path_in_file(file)):
        return path, f"--config {file}: {CUSTOM_ARGUMENTS}"
    return os.environ.get(CUSTOM_ARGUMENTS_VARIABLE) or None, CUSTOM_ARGUMENTS_VARIABLE


def _value_of(option: str, words: Sequence[str]) -> str | None:
    last = None
    for word, following in itertools.pairwise([*words, ""]):
        name, equals, joined = word.partition("=")
        if name == option:
            last = joined if equals else following
    return last


def _path_in_file(path: str) -> str | None:
    """Return the path that the file of ``--config`` gives; mistakes in the file are reported when all of it is read."""
    from slime.arguments.files import yaml_source

    try:
        data = yaml_source.read(path, "--config").data
    except ArgumentError:
        return None
    section = data.get("arguments")
    value = (section if isinstance(section, dict) else data).get(CUSTOM_ARGUMENTS[2:].replace("-", "_"))
    return value if isinstance(value, str) else None


def _load_custom_arguments(path: str, source: str) -> Any:
    from slime.utils.misc import load_function

    try:
        function = load_function(path, source)
    except (ValueError, ImportError, AttributeError) as error:
        raise ArgumentError(str(error)) from error
    if not callable(function):
        raise ArgumentError(
            f"{source} {path}: expected a function that takes the parser, got {type(function).__name__}"
        )
    return function
