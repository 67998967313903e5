"""Names, completeness, publication and removal of checkpoint directories. No torch, no Megatron: plain files.

Layout (Megatron-LM's): ``<root>/latest_checkpointed_iteration.txt`` names the iteration, ``<root>/iter_0000012``
holds it. A checkpoint is written to ``iter_0000012.writing`` and renamed when every rank has finished; the tracker is
replaced last. A process killed at any moment therefore leaves the tracker pointing at a complete directory.

What a checkpoint is of (``--ckpt-format``) is seen by its files: ``torch_dist`` and ``torch_dcp`` have one
``.metadata`` for all, ``torch`` a directory per model-parallel rank.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from slime.arguments.args import Args
from slime.utils import checkpoint_tracker, digests
from slime.utils.atomic_file import sync
from slime.utils.checkpoint_tracker import TRACKER
from slime.utils.directory_lock import Owner

logger = logging.getLogger(__name__)

TORCH_DIST, TORCH, TORCH_DCP = "torch_dist", "torch", "torch_dcp"
_WRITING, _REPLACED = ".writing", ".replaced"
"""Ends of the names of directories that are no checkpoints: being written, and to be removed."""
_WRITER = ".writer.json"
"""In the root: who writes a checkpoint, as long as it is being written."""


def iteration_dir(root: str | Path, iteration: int) -> Path:
    """Return the directory of ``iteration`` below ``root``."""
    return Path(root) / f"iter_{iteration:07d}"


def is_megatron_checkpoint(root: str | Path | None) -> bool:
    """Return whether ``root`` has a tracker file, i.e. is a Megatron checkpoint and not e.g. a Hugging Face one."""
    return root is not None and (Path(root) / TRACKER).is_file()


def find_checkpoint(root: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """Return (directory, iteration) of the checkpoint to load from ``root``; the tracked one unless ``step`` is given.

    Iteration is None for a ``release`` checkpoint. Raises FileNotFoundError when the directory is not there and
    ValueError when it is incomplete.
    """
    iteration = checkpoint_tracker.read(root) if step is None else step
    directory = Path(root) / "release" if iteration is None else iteration_dir(root, iteration)
    if not directory.is_dir():
        # Killed between the two renames of a checkpoint that is saved a second time: the first one is still whole.
        aside = directory.with_name(directory.name + _REPLACED)
        if not aside.is_dir():
            present = sorted(p.name for p in Path(root).glob("iter_*") if p.is_dir())
            raise FileNotFoundError(f"there is no checkpoint {directory}; {root} has {present or 'none'}")
        directory = aside
    try:
        absent = _absent(directory)
    except digests.DamagedFile as e:
        raise ValueError(
            f"checkpoint {directory} cannot be read, a file of it is damaged or cut off: {e}. Choose another iteration "
            "with --ckpt-step"
        ) from e
    if absent is not None:
        raise ValueError(
            f"checkpoint {directory} is incomplete: it has no {absent}. Choose another iteration of {root} with "
            "--ckpt-step"
        )
    return directory, iteration


def rollout_files(root: str | Path, iteration: int) -> list[str]:
    """Return the files below ``root`` that hold the state of the rollouts at ``iteration``."""
    found = (Path(root) / "rollout").glob(f"*_{iteration}.json")
    return sorted(f"rollout/{path.name}" for path in found)


def check_rollout_files(root: str | Path, iteration: int, *, prompts: bool = True) -> None:
    """Raise FileNotFoundError for a file that was there when ``iteration`` was saved, and is not."""
    directory = iteration_dir(root, iteration)
    listed = digests.read(directory)
    for name in () if listed is None else listed.beside:
        if not (Path(root) / name).is_file() and (prompts or not name.startswith("rollout/global_dataset")):
            raise FileNotFoundError(
                f"{Path(root) / name} was saved with {directory} and is gone: prompts would start over. Put it back, "
                "choose another iteration with --ckpt-step, or take the weights as a fresh start with --finetune"
            )


def stored_format(directory: Path) -> str:
    """Return the ``--ckpt-format`` of the checkpoint in ``directory``, which is complete."""
    if any(directory.glob("mp_rank_*")):
        return TORCH
    return TORCH_DIST if (directory / "metadata.json").is_file() else TORCH_DCP


def _absent(directory: Path) -> str | None:
    """Return the first file that a checkpoint should have and ``directory`` has not."""
    listed = digests.read(directory)
    for name in () if listed is None else listed.files:
        if not (directory / name).is_file():
            return name
    if ranks := sorted(directory.glob("mp_rank_*")):
        names = [f"{rank.name}/model_optim_rng.pt" for rank in ranks]
    elif any(directory.glob("*.distcp")) and not any((directory / n).is_file() for n in ("metadata.json", "common.pt")):
        names = [".metadata"]
    else:
        names = ["metadata.json", ".metadata", "common.pt"]
    return next((name for name in names if not (directory / name).is_file()), None)


def begin(root: str | Path, iteration: int) -> Path:
    """Make and return the empty directory to write ``iteration`` into. Removes what earlier crashes left behind.

    Raises RuntimeError when another process is writing another one.
    """
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    note = root / _WRITER  # not inside: Megatron would take the directory for an old one
    writer = Owner.parse(note.read_text(errors="replace")) if note.is_file() else None
    for leftover in root.glob(f"iter_*{_WRITING}"):
        if writer is not None and writer.pid != os.getpid() and writer.is_alive():
            raise RuntimeError(f"{leftover} is being written by another run, {writer}; only one may write to a --save")
        logger.warning("%s was never completed, and is removed", leftover)
        shutil.rmtree(leftover)
    directory = iteration_dir(root, iteration)
    writing = directory.with_name(directory.name + _WRITING)
    writing.mkdir()
    note.write_text(Owner.here(f"checkpoint {iteration}").to_json())
    return writing


def publish(root: str | Path, iteration: int) -> Path:
    """Turn the directory that ``begin`` made into the current checkpoint and return its final name."""
    directory = iteration_dir(root, iteration)
    writing = directory.with_name(directory.name + _WRITING)
    aside = directory.with_name(directory.name + _REPLACED)
    for path in writing.rglob("*"):
        sync(path)
    sync(writing)
    if directory.exists():
        logger.warning("%s was saved before, and is replaced", directory)
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(directory, aside)
    os.replace(writing, directory)
    sync(Path(root))
    checkpoint_tracker.write(root, f"{iteration}\n")
    (Path(root) / _WRITER).unlink(missing_ok=True)
    for old in Path(root).glob(f"iter_*{_REPLACED}"):
        shutil.rmtree(old)
    return directory


def outdated(args: Args, iterations: list[int], newest: int) -> list[int]:
    """Return which of ``iterations`` may go now that ``newest`` is complete, in ascending order.

    Kept are the last ``--most-recent-k``; those after every ``--save-retain-interval`` rollouts, without the other flag
    beside the newest one; and what the reference and a teacher are loaded from. A run with a critic keeps two
    of each: killed between its two saves it resumes from the ones before. Later iterations than ``newest``, of a run
    that was resumed from an earlier one, are left alone.
    """
    count, every = args.most_recent_k, args.save_retain_interval
    if count < 1 and every is None:
        return []
    older = sorted(i for i in iterations if i <= newest)
    kept = set(older[-max(count, 2 if args.use_critic else 1) :])
    if every is not None:
        kept |= {i for i in older if (i + 1) % every == 0}
    if interval := args.ref_update_interval:
        kept.add((newest + 1) // interval * interval - 1)
    kept |= {step for step in (args.ref_ckpt_step, args.opd_teacher_ckpt_step) if step is not None}
    return [i for i in older if i not in kept]


def remove_outdated(args: Args, root: Path, newest: int) -> None:
    """Remove the checkpoints below ``root`` that are outdated, with the states of the rollouts that belong to them.

    What cannot be removed is a warning: the checkpoints that count are complete.
    """
    present = {int(found[1]): path for path in root.iterdir() if (found := re.fullmatch(r"iter_(\d{7,})", path.name))}
    for iteration in outdated(args, list(present), newest):
        aside = present[iteration].with_name(present[iteration].name + _REPLACED)
        try:
            os.replace(present[iteration], aside)  # one that is half removed is none
            for name in rollout_files(root, iteration):
                (root / name).unlink()
            shutil.rmtree(aside)
        except OSError as e:
            logger.warning("cannot remove checkpoint %s, which is outdated: %s", present[iteration], e)
        else:
            logger.info("removed %s", present[iteration])
