"""Ranks of ``test_log_prob_server``."""

from __future__ import annotations

from typing import Any

from slime.batching.log_prob_requests import LogProbRequest, shards_of_requests
from tests.support.ranks import new_trainer


def replies(checkpoint: str, layouts: list[dict[str, Any]], requests: list[dict[str, Any]]) -> list[list[Any]]:
    """Return what this rank replies in every layout: (position of a request, its reply) where it is the one to."""
    found = []
    for layout in layouts:
        trainer, _ = new_trainer(checkpoint, num_rollout=0, **layout)
        asked = [LogProbRequest.of(**request) for request in requests]
        shards, positions = shards_of_requests(trainer.args, trainer.parallel_config, asked)
        answer = trainer.served_log_probs(shards)
        found.append([] if answer is None else list(zip(positions[answer[0]], answer[1], strict=True)))
    return found


def weights_of(checkpoint: str, other: str) -> list[Any]:
    """Return the log-probs of a sequence before and after the weights of ``other`` are loaded."""
    trainer, _ = new_trainer(checkpoint, num_rollout=0, tensor_model_parallel_size=2)
    asked = [LogProbRequest.of([1, 2, 3, 4])]
    shards, _ = shards_of_requests(trainer.args, trainer.parallel_config, asked)
    before = trainer.served_log_probs(shards)
    trainer.load_weights(other)
    after = trainer.served_log_probs(shards)
    return [None if one is None else one[1][0].log_probs for one in (before, after)]
