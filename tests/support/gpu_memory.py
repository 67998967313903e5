"""GPU memory of a trainer: at rest, at the peak of a step, offloaded; and the dry run's estimates of it."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gpu import memory_in_use
from tests.support.ranks import new_trainer
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import train_once

SAMPLES, LENGTH = 4, 4096


def gibibytes(checkpoint: str, settings: dict[str, Any]) -> dict[str, float]:
    """Train in bf16 on one micro-batch of ``SAMPLES`` samples of ``LENGTH`` tokens; return GiB."""
    from slime.preflight.plan.memory_trainer import trainer_memory
    from slime.preflight.plan.model_size import model_size

    others = memory_in_use()
    trainer, _ = new_trainer(
        checkpoint,
        bf16=True,
        accumulate_allreduce_grads_in_fp32=True,
        global_batch_size=SAMPLES,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=SAMPLES * LENGTH,
        use_rollout_entropy=True,  # so that there is a pass of log-probs
        **settings,
    )
    (estimate,) = trainer_memory(trainer.args, model_size(trainer.args))
    response = LENGTH - 9  # and prompts of two to nine tokens
    data = make_train_data(prompts=SAMPLES // 2, vocab_size=150_000, shortest=response, longest=response)
    train_once(trainer, 0, data)  # makes the moments
    measured: dict[str, int] = {}
    drain = trainer._memory.drain
    trainer._memory.drain = lambda: measured.update(drain()) or measured
    train_once(trainer, 1, data)
    context = memory_in_use() - others - torch.cuda.memory_reserved()
    at_rest = torch.cuda.memory_allocated()
    trainer.offload()
    found = {
        "at rest": at_rest,
        "asleep": torch.cuda.memory_allocated(),
        "context": context,
        "estimated at rest": estimate.static - estimate.context,
        "estimated peak": estimate.step - estimate.context,
        "estimated context": estimate.context,
        **measured,
    }
    return {name: value / 2**30 for name, value in found.items()}
