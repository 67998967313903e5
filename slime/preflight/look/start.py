"""Start the process that looks, and read what it found."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from typing import Any

from slime.arguments.args import Args
from slime.arguments.groups import slime_flags
from slime.preflight.look import Findings

DEADLINE_S = 180.0
_PROGRAM = "import sys; sys.path[:] = {path!r}; from slime.preflight.look.child import main; main()"
_SHOWN = 5


def look(args: Args, *, dry_run: bool = False) -> Findings:
    """Return what a look at the prompts and hooks of ``args`` finds, within ``DEADLINE_S``.

    With ``dry_run`` what is not on this machine is no error. A look that does not come to its end is a warning.
    """
    found = Findings()
    if args.skip_first_look:
        return found
    absent = (
        dry_run and not args.serve_only and not os.path.exists(args.hf_checkpoint or "") and not _prompts_are_here(args)
    )
    if absent and not _hooks_are_given(args):
        found.unchecked.append("prompts: neither the checkpoint nor the prompts are on this machine")
        return found
    path = [os.path.abspath(entry) for entry in sys.path] + [os.getcwd()]  # where Ray's workers look too
    try:
        request = pickle.dumps((args, dry_run))
    except (pickle.PicklingError, TypeError, AttributeError) as e:
        found.unchecked.append(f"prompts and hooks: the arguments cannot be sent to another process ({e})")
        return found
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM.format(path=path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = child.communicate(request, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            _end(child)
            output = child.communicate()[0]
        finally:
            _end(child)
        doing = _read(output, found)
        if doing is not None:
            said.seek(0)
            last = said.read().decode(errors="replace").splitlines()[-_SHOWN:]
            found.warnings.append(_unfinished(doing, child.returncode, last))
    return found


def _prompts_are_here(args: Args) -> bool:
    from slime.utils.prompt_files import split_slice

    return args.prompt_data is not None and os.path.exists(split_slice(args.prompt_data)[0])


def _hooks_are_given(args: Args) -> bool:
    """Return True if a flag names a function of the user's own."""
    others = {f.dest for f in slime_flags() if f.traits.path or (f.traits.hook and f.traits.hook.caller == "parser")}
    flags = [name for name in args.explicit_flags if name.endswith("_path") and name not in others]
    named = [getattr(args, name) or [] for name in flags]
    paths = itertools.chain.from_iterable([value] if isinstance(value, str) else value for value in named)
    return any(not path.startswith(("slime.", "slime_plugins.")) for path in paths)


def _read(output: bytes, found: Findings) -> str | None:
    """Add the findings that the lines of ``output`` hold; return what was done last, None where all was done."""
    doing: str | None = "the start of its process"
    for line in output.decode(errors="replace").splitlines():
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError:  # cut off
            continue
        if message["kind"] == "begins":
            doing = message["text"]
        elif message["kind"] == "done":
            doing = None
        else:
            getattr(found, message["kind"]).append(message["text"])
    return doing


def _unfinished(doing: str, code: int, last_lines: list[str]) -> str:
    how = f"took more than {DEADLINE_S:.0f} s" if code == -signal.SIGKILL else f"ended the process (status {code})"
    said = f"; it said last: {' | '.join(last_lines)}" if last_lines else ""
    return f"prompts and hooks were not looked at to the end: {doing} {how}{said}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the process and what users' code started in it."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
