"""The directories that a run writes its state to: held for the length of the run, against a second start of it."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.roles import CRITIC, role_args
from slime.observability.run_dir import command_line, make_private
from slime.utils.atomic_file import FULL, space_left
from slime.utils.directory_lock import NAME, DirectoryLock, HeldByAnother

logger = logging.getLogger(__name__)

_NAME_CHARS = 200
_held: dict[Path, DirectoryLock] = {}


def hold(args: Args) -> None:
    """Lock every directory that the run writes state to, until ``release`` or the end of this process.

    Before anything is written. What this process holds already stays held. Raises ArgumentError, with nothing newly
    held, naming the run that writes there, or the directory that cannot be written.
    """
    taken: list[Path] = []
    try:
        for what, file in _locks(args):
            if file not in _held and (lock := _lock(args, what, file)) is not None:
                _held[file] = lock
                taken.append(file)
    except BaseException:
        for file in taken:
            _held.pop(file).release()
        raise


@atexit.register
def release() -> None:
    """Give up every lock of this process."""
    while _held:
        _held.popitem()[1].release()


def _lock(args: Args, what: str, file: Path) -> DirectoryLock | None:
    try:
        if what.startswith("--run-dir"):
            file.parent.parent.mkdir(parents=True, exist_ok=True)
            make_private(file.parent)
        return DirectoryLock(file, what, command_line())
    except HeldByAnother as e:
        raise ArgumentError(str(e)) from None
    except OSError as e:
        of_people = what.startswith("--run-dir")
        # Trainers on other nodes may see a directory that this host does not.
        if e.errno in FULL if of_people else args.actor_num_nodes > 1:
            logger.warning("%s is not locked against a second start: %s%s", what, e.strerror, space_left(file))
            return None
        space = space_left(file) if e.errno in FULL else ""
        raise ArgumentError(f"{what} cannot be written: {file}: {e.strerror or e}{space}") from e


def _locks(args: Args) -> Iterator[tuple[str, Path]]:
    """Yield what is locked, as messages name it, and the file of its lock."""
    for option, value in _directories(args):
        yield f"{option} {value}", Path(os.path.realpath(value)) / NAME
    # Files of templates that are written lie among those of others.
    written = flags_where(lambda traits: traits.template and traits.template.needed)
    for flag in written if not args.serve_only else ():
        if template := getattr(args, flag.dest):
            path = Path(os.path.realpath(template))
            fixed = next(parent for parent in path.parents if "{" not in str(parent))
            rest = "+".join(path.relative_to(fixed).parts)[-_NAME_CHARS:]
            yield f"{flag.option} {template}", fixed / f".{rest}{NAME}"


def _directories(args: Args) -> Iterator[tuple[str, str]]:
    """Yield flag and value of the directories that the run writes state to."""
    trains = not args.debug_rollout_only and not args.serve_only
    if trains and args.num_rollout != 0 and args.save:
        yield "--save", args.save
        if args.use_critic and (own := role_args(args, CRITIC).save):
            yield "save of the critic", own
    if trains and not args.debug_train_only and args.update_weight_transport == "disk":
        for name in ("update_weight_disk_dir", "update_weight_local_checkpoint_dir"):
            if directory := getattr(args, name):
                yield _flag(name), directory
    if args.run_dir:
        yield "--run-dir", args.run_dir


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
