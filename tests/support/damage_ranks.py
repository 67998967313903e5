"""Ranks of ``tests/integration/test_damaged_files.py``: save, damage every file in turn, load."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime.backends.megatron_utils.checkpoints.save_load import load_checkpoint
from slime.utils.distributed_utils import control_group
from tests.support.ranks import error_of, new_trainer, same_tensors
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import parameters, train_once


def flipped(content: bytes, dice: random.Random) -> bytes:
    """Return ``content`` with one bit changed."""
    at = dice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << dice.randrange(8)]) + content[at + 1 :]


def damages(content: bytes, other: bytes | None, flips: int, seed: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield what can happen to a file, with what it holds then (None: nothing, it is gone)."""
    dice = random.Random(seed)
    for number in range(flips):
        yield f"flip {number}", flipped(content, dice)
    yield "cut off", content[: len(content) // 2]
    yield "empty", b""
    yield "gone", None
    if other is not None and other != content:
        yield "of another iteration", other


def damage_every_file(checkpoint: str, folder: str, flips: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Save two iterations; return, by file and damage, what loading the second says, and the files of the second."""
    save = Path(folder) / "save"
    trainer, _ = new_trainer(checkpoint, save=str(save), **flags)
    for rollout_id in range(2):
        train_once(trainer, rollout_id, make_train_data(seed=rollout_id))
        trainer.save(rollout_id)
    trainer.finish_saving()
    before, args, state = parameters(trainer), trainer.args, trainer._state
    read = [path for path in sorted(save.rglob("*")) if path.is_file() and "iter_0000000" not in str(path)]
    said: dict[str, str] = {}
    for path in read:
        content, at = path.read_bytes(), path.stat().st_mtime_ns
        twin = Path(str(path).replace("iter_0000001", "iter_0000000"))
        other = twin.read_bytes() if twin != path and twin.is_file() else None
        for what, changed in damages(content, other, flips, path.name):
            _apart(lambda path=path, changed=changed, at=at: _put(path, changed, at))
            try:
                load_checkpoint(args, save, state)
                said[f"{path}: {what}"] = "loaded"
            except (ValueError, OSError) as e:
                said[f"{path}: {what}"] = f"{type(e).__name__}: {e}"
            _apart(lambda path=path, content=content, at=at: _put(path, content, at))
    iteration = load_checkpoint(args, save, state)
    same = same_tensors(parameters(trainer), before)
    return {"said": said, "read": [str(path) for path in read], "iteration": iteration, "same": same}


def without_digests(checkpoint: str, folder: str) -> dict[str, Any]:
    """Load a checkpoint as another program leaves it, and one that has lost its digests."""
    save = Path(folder) / "save"
    trainer, _ = new_trainer(checkpoint, save=str(save))
    trainer.save(0)
    (save / "iter_0000000/digests.json").unlink()
    lost = error_of(lambda: load_checkpoint(trainer.args, save, trainer._state))
    shutil.rmtree(save)
    return {"lost": lost}


def _put(path: Path, content: bytes | None, at: int) -> None:
    """Let a file hold ``content``, with the time that it had, as a disk does that damages it."""
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content)
        os.utime(path, ns=(at, at))


def _apart(action: Any) -> None:
    """Let the first rank do something while the others wait."""
    dist.barrier(group=control_group())
    if dist.get_rank() == 0:
        action()
    dist.barrier(group=control_group())
