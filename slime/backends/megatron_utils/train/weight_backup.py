"""The policies that take turns in the trainer's model: copies of their weights on the host, and where these come from.

The actor is trained; the reference, the teacher of on-policy distillation and the old actor (--keep-old-actor) are not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.checkpoints.digests import WAY_BACK_OF_HF, check_files
from slime.backends.megatron_utils.checkpoints.directory import find_checkpoint, is_megatron_checkpoint, iteration_dir
from slime.backends.megatron_utils.checkpoints.save_load import TrainerState, load_checkpoint
from slime.backends.megatron_utils.state.host_copy import HostCopy


def _named_tensors(model: Sequence[torch.nn.Module], trained_only: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers of all chunks under unique names; with ``trained_only`` trained parameters alone."""
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad or not trained_only:
                yield f"{index}.{name}", parameter
        for name, buffer in chunk.named_buffers() if not trained_only else ():
            yield f"{index}.{name}", buffer


class WeightBackup:
    """Host copies of ``model`` (a list of chunks) under tags such as ``actor`` and ``ref``.

    ``active`` is the tag whose weights are in the model now. On CUDA the copies are pinned and the transfers overlap.
    ``trained_only``: the policies differ in what is trained alone (adapters on one base).
    """

    def __init__(self, model: Sequence[torch.nn.Module], active: str, *, trained_only: bool = False) -> None:
        self._model = model
        self._trained_only = trained_only
        self._copies: dict[str, dict[str, HostCopy]] = {}
        self.active = active

    @property
    def tags(self) -> list[str]:
        """The tags that have a copy."""
        return list(self._copies)

    @property
    def host_bytes(self) -> int:
        """Bytes of all copies."""
        return sum(copy.nbytes for copies in self._copies.values() for copy in copies.values())

    def forget_active(self) -> None:
        """Give back the copy of the weights that are in the model, if there is one. ``save`` makes it again."""
        self._copies.pop(self.active, None)

    @torch.no_grad()
    def save(self, tag: str) -> None:
        """Copy the weights that are in the model now to host memory as ``tag`` (overwrites an earlier copy)."""
        copies = self._copies.setdefault(tag, {})
        for name, tensor in _named_tensors(self._model, self._trained_only):
            if name not in copies:
                copies[name] = HostCopy(tensor)
            copies[name].take(tensor)
        _wait_for_copies(self._model)

    @torch.no_grad()
    def activate(self, tag: str) -> None:
        """Put the weights ``tag`` into the model. No-op if they are there. Raises KeyError for a tag without a copy."""
        if tag == self.active:
            return
        if tag not in self._copies:
            raise KeyError(f"no weights were kept under the tag {tag!r}; there are {sorted(self._copies)}")
        for name, tensor in _named_tensors(self._model, self._trained_only):
            self._copies[tag][name].give(tensor)
        _wait_for_copies(self._model)
        self.active = tag

    @torch.no_grad()
    def copy(self, source: str, target: str) -> None:
        """Make the copy ``target`` equal to the copy ``source``."""
        for name, copy in self._copies[source].items():
            self._copies[target][name].copy_(copy)


def _wait_for_copies(model: Sequence[torch.nn.Module]) -> None:
    """Block until asynchronous device/host copies are done (CPU copies are already)."""
    if any(parameter.is_cuda for chunk in model for parameter in chunk.parameters()):
        torch.cuda.synchronize()


logger = logging.getLogger(__name__)


def refreshed_reference(args: Args) -> tuple[str, int] | None:
    """Return (root, iteration) of the checkpoint whose weights the reference had when the run stopped, or None.

    After rollout ``r`` with ``(r + 1) % interval == 0`` the actor becomes the reference, so on resume it is the actor
    of the last such rollout and not ``--ref-load``. None: nothing is resumed, the reference was never refreshed, or
    (with a warning, since the KL term changes then) that iteration was not saved.
    """
    interval, load = args.ref_update_interval, args.load
    if not interval or not is_megatron_checkpoint(load) or args.finetune:
        return None
    _, iteration = find_checkpoint(load, args.ckpt_step)
    refreshed = 0 if iteration is None else (iteration + 1) // interval * interval
    if refreshed == 0:
        return None
    if not iteration_dir(load, refreshed - 1).is_dir():
        logger.warning(
            "the reference was last refreshed after rollout %d, which %s has no checkpoint of: it starts again from "
            "--ref-load, and the KL to it jumps. Let --ref-update-interval be a multiple of --save-interval",
            refreshed - 1,
            load,
        )
        return None
    return str(load), refreshed - 1


TEACHER = "teacher"


def load_teacher(args: Args, model: Sequence[torch.nn.Module], backup: WeightBackup) -> None:
    """Load ``--opd-teacher-load`` through ``model`` into ``backup`` as ``teacher`` (collective).

    A Megatron checkpoint (at ``--opd-teacher-ckpt-step``, else the step it tracks) or a Hugging Face directory, of the
    student's architecture: it takes turns with the student in one model. Raises ValueError where it does not fit.
    ``model`` holds the teacher's weights afterwards.
    """
    from slime.backends.megatron_utils.weights import load_hf

    source, step = args.opd_teacher_load, args.opd_teacher_ckpt_step
    assert source is not None, "--opd-type megatron needs --opd-teacher-load"
    try:
        if is_megatron_checkpoint(source):
            state = TrainerState(model, base_only=bool(args.lora_rank))
            load_checkpoint(args, source, state, step=step, weights_only=True)
        elif step is not None:
            raise ValueError(
                f"--opd-teacher-ckpt-step {step}: {source} is no Megatron checkpoint with steps to choose from"
            )
        else:
            check_files(Path(source), WAY_BACK_OF_HF)
            load_hf(model, source, args)
    except Exception as error:
        error.add_note(
            f"while loading the teacher from --opd-teacher-load {source}, which must have the student's architecture "
            "(layers, sizes, vocabulary); a teacher of another one can answer from a server: --opd-type sglang"
        )
        raise
    backup.save(TEACHER)
    logger.info("loaded the teacher from %s", source)


OLD_ACTOR, ROLLOUT_ACTOR = "old_actor", "rollout_actor"


class OldActor:
    """Keeps the weights under the tag ``old_actor`` of ``backup`` in step with the weight syncs.

    In the synchronous loop the engines have the weights of the latest sync when a rollout begins. In the overlapped
    one the rollout trained on next began before the latest sync when every training step ends with one: a queue of two
    holds the weights of the latest sync (``rollout_actor``) and of the one before (``old_actor``). With a larger
    ``update_weights_interval`` every rollout but the first one trained on after a sync began after it: its weights are
    kept, and that first one gets weights one sync too new.

    A run that starts, or starts again, begins with the weights it has loaded: its first rollout is generated by them.
    """

    def __init__(self, backup: WeightBackup, update_weights_interval: int) -> None:
        self._backup = backup
        self._interval = update_weights_interval
        self._trained = False
        backup.save(OLD_ACTOR)

    def trained(self) -> None:
        """Note that the weights in the model have changed since the latest sync."""
        self._trained = True

    def synced(self, *, synchronous_loop: bool) -> None:
        """Note that the engines have the weights that are in the model now. The same weights again change nothing."""
        if synchronous_loop or self._interval > 1:
            self._backup.save(OLD_ACTOR)
        elif ROLLOUT_ACTOR not in self._backup.tags:
            self._backup.save(ROLLOUT_ACTOR)
        elif self._trained:
            self._backup.copy(ROLLOUT_ACTOR, OLD_ACTOR)
            self._backup.save(ROLLOUT_ACTOR)
        self._trained = False
