"""Run a function of the driver as a program: signals, exit codes, short failure messages."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from slime.arguments import ArgumentError
from slime.arguments.args import Args
from slime.observability.logging_utils import configure_logger
from slime.ray.remote import RemoteFailure, clean_traceback, one_line_kind
from slime.utils import shared_memory
from slime.utils.atomic_file import space_left, write_atomically
from slime.utils.secrets import hide_command_line, mask_text, remember
from slime.utils.user_code import users_frames

SHORT_MESSAGE_LINES = 6
USERS_LINES = 10


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived.

    Where it interrupts Ray's own code, Ray knows KeyboardInterrupt alone: it stops waiting and raises a plain one, and
    of anything else it makes a SystemError.
    """


class _Sigterm:
    """Turns SIGTERM into ``Terminated``, and records that it arrived."""

    arrived = False

    def __call__(self, *_: object) -> None:
        self.arrived = True
        raise Terminated


_sigterm = _Sigterm()


def run_as_program(args: Args, body: Callable[[], None]) -> int:
    """Run ``body`` and return the exit code: 0 success, 1 failure, 2 wrong flags, 130 Ctrl-C, 143 SIGTERM.

    The cause of a failure is printed last; the full traceback is in ``<run_dir>/logs/failure.txt``.
    """
    hide_command_line()
    remember(args)
    configure_logger("driver")
    _sigterm.arrived = False
    handle_sigterm()
    try:
        body()
    except KeyboardInterrupt as e:
        terminated = _sigterm.arrived or isinstance(e, Terminated)
        _say("terminated" if terminated else "interrupted")
        return 128 + (signal.SIGTERM if terminated else signal.SIGINT)
    except ArgumentError as e:
        for line in str(e).splitlines():
            _say(f"{Path(sys.argv[0]).name}: error: {line}")
        return 2
    except Exception as e:  # noqa: BLE001  (last resort of the program: reported, and turned into an exit code)
        _report_failure(args, e)
        return 1
    return 0


def handle_sigterm() -> None:
    """Turn SIGTERM into ``Terminated``, so that the run is cleaned up. Does nothing outside the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _sigterm)


def _report_failure(args: Args, error: Exception) -> None:
    details = error.details if isinstance(error, RemoteFailure) and error.details else clean_traceback(error)
    details = mask_text(details)
    message = mask_text(one_line_kind(error))
    where = _keep_details(args, f"{message}\n\n{details}\n")
    if shared_memory.DIRECTORY.name not in message:
        message += shared_memory.hint(message)
    # A long message is complete (an engine's last lines); a short one needs the place it came from.
    if len(message.splitlines()) <= SHORT_MESSAGE_LINES:
        kept = where.startswith("\n(details: ")
        own = users_frames(details) if kept else []  # of a user's mistake the user's lines, of others all
        shown = "\n".join(["in your code:", *own[-USERS_LINES:]]) if own else details
        _say(f"{shown}\n")
    _say(f"error: {message}{where}")


def _keep_details(args: Args, text: str) -> str:
    """Write ``text`` to the run directory; return what to say about it."""
    if not args.run_dir:
        return ""
    path = Path(args.run_dir) / "logs" / "failure.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode(errors="backslashreplace"), private=True)
    except OSError as e:
        return f"\n(the details cannot be written to {path}: {e.strerror or e}{space_left(path)})"
    return f"\n(details: {path})"


def _say(text: str) -> None:
    """Print to the terminal, or file, that may be gone or full: the exit code still says what happened."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
