"""Command line: ``slime COMMAND ...`` (or ``python -m slime COMMAND ...``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A subcommand: ``run`` takes the words after its name and returns the exit status."""

    run: Callable[[Sequence[str]], int]
    summary: str


def _serve(words: Sequence[str]) -> int:
    from slime.arguments.parse import ArgumentError, exit_with, parse_args
    from slime.preflight.look.start import look

    try:
        args = parse_args(words, serve=True, look=look)
        found = look(args)
        if found.errors:
            raise ArgumentError("\n".join(found.errors))
    except ArgumentError as error:
        exit_with(error)
    for sentence in [*found.warnings, *found.unchecked]:
        print(f"slime: warning: {sentence}", file=sys.stderr)
    from slime.ray.driver.program import run_as_program  # after the arguments: a mistyped flag is answered at once
    from slime.ray.driver.serving import serve

    return run_as_program(args, lambda: serve(args))


def _engines(words: Sequence[str]) -> int:
    from slime.ray.driver.engines_command import change_engines

    return change_engines(words)


COMMANDS = {
    "engines": Command(_engines, "list, add, drain or remove the engines of a run in progress"),
    "serve": Command(_serve, "start engines and their routers, and keep them running until a signal ends them"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` names; return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    name, *rest = words or [""]
    if name in COMMANDS:
        return COMMANDS[name].run(rest)
    asks = name in ("-h", "--help")
    out = sys.stdout if asks else sys.stderr
    if not asks:
        print(f"slime: error: {f'unknown command {name}' if name else 'a command is missing'}", file=out)
    print("usage: slime COMMAND ...; `slime COMMAND --help` lists its flags", file=out)
    for known, command in COMMANDS.items():
        print(f"  {known:10}{command.summary}", file=out)
    return 0 if asks else 2


if __name__ == "__main__":
    sys.argv[0] = "slime"  # in messages, and in the command line that the run directory keeps
    sys.exit(main())
