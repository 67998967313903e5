"""The teacher of on-policy distillation that takes turns with the student in the trainer's model."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections.abc import Sequence

import torch

from slime.backends.megatron_utils.checkpoint import TrainerState, load_checkpoint
from slime.backends.megatron_utils.checkpoint_dir import is_megatron_checkpoint
from slime.backends.megatron_utils.weight_backup import WeightBackup

TEACHER = "teacher"
logger = logging.getLogger(__name__)


def has_teacher(args: Namespace) -> bool:
    """Return whether the trainer holds a teacher's weights (``--use-opd --opd-type megatron``)."""
    return args.use_opd and args.opd_type == "megatron"


def load_teacher(args: Namespace, model: Sequence[torch.nn.Module], backup: WeightBackup) -> None:
    """Load ``--opd-teacher-load`` through ``model`` into ``backup`` as ``teacher`` (collective).

    A Megatron checkpoint (at ``--opd-teacher-ckpt-step``, else the step it tracks) or a Hugging Face directory, of the
    student's architecture: it takes turns with the student in one model. Raises ValueError where it does not fit.
    ``model`` holds the teacher's weights afterwards.
    """
    from slime.backends.megatron_utils.weights import load_hf

    source, step = args.opd_teacher_load, args.opd_teacher_ckpt_step
    try:
        if is_megatron_checkpoint(source):
            load_checkpoint(args, source, TrainerState(model), step=step, weights_only=True)
        elif step is not None:
            raise ValueError(
                f"--opd-teacher-ckpt-step {step}: {source} is no Megatron checkpoint with steps to choose from"
            )
        else:
            load_hf(model, source, args)
    except Exception as error:
        error.add_note(
            f"while loading the teacher from --opd-teacher-load {source}, which must have the student's architecture "
            "(layers, sizes, vocabulary); a teacher of another one can answer from a server: --opd-type sglang"
        )
        raise
    backup.save(TEACHER)
    logger.info("loaded the teacher from %s", source)
