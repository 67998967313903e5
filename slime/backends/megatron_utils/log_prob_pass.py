"""Forward passes without gradients: log-probs and entropies of all samples of a rollout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.data import RolloutData, num_samples, steps_of
from slime.backends.megatron_utils.hooks import TrainerHooks
from slime.backends.megatron_utils.parallel import is_last_stage
from slime.backends.megatron_utils.schedule_call import run_schedule


@torch.no_grad()
def forward_only(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    data: RolloutData,
    collect: Callable[..., tuple[Tensor, dict[str, list[Tensor]]]],
    hooks: TrainerHooks,
    *,
    store_prefix: str = "",
) -> dict[str, list[Tensor]]:
    """Run ``model`` over all samples of this rank and return what ``collect`` makes of the logits.

    ``collect`` has the signature of ``loss.get_log_probs_and_entropy``. The result maps ``store_prefix + name`` to one
    tensor per sample in the CP-local layout, in the order of ``data``; it is empty except on the last pipeline stage.
    """
    for chunk in model:
        chunk.eval()
    if hooks.before_log_prob is not None:
        hooks.before_log_prob(args, model, store_prefix)

    def collecting(batch: dict[str, Any]) -> Any:
        return partial(
            collect,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
        )

    # The passes have no optimiser step between them: all steps' micro-batches make one long pipeline.
    micro_batches = [indices for step in steps_of(data) for indices in step]
    results = run_schedule(args, model, data, micro_batches, collecting, forward_only=True)
    for chunk in model:
        chunk.train()
    if not is_last_stage():
        return {}
    columns: dict[str, list[Any]] = {}
    for indices, (_, values) in zip(micro_batches, results, strict=True):
        for name, tensors in values.items():
            column = columns.setdefault(store_prefix + name, [None] * num_samples(data))
            for index, tensor in zip(indices, tensors, strict=True):
                column[index] = tensor
    return columns


def old_log_probs_equal_current(args: Namespace, data: RolloutData) -> bool:
    """Return whether the separate old log-prob pass can be left out because its result is known.

    With one optimiser step per rollout the policy that is differentiated *is* the old policy, so its detached
    log-probs are the old ones (ratio 1). That needs a policy loss and nothing that reads the old log-probs, or
    anything else from that pass, before the step: KL in the reward, engine log-probs as old policy, mismatch metrics,
    a critic, an old actor, distillation, recorded routing, GSPO's sequence ratio, a custom advantage function, the
    entropy of the pass, or dropout (which is off in the pass and on in the step).
    """
    replays_engine_routing = getattr(args, "use_rollout_routing_replay", False)
    return len(data["num_microbatches"]) == 1 and not any(
        [
            args.loss_type != "policy_loss",
            getattr(args, "kl_coef", 0) != 0,
            getattr(args, "use_rollout_logprobs", False),
            getattr(args, "get_mismatch_metrics", False),
            getattr(args, "use_critic", False),
            getattr(args, "keep_old_actor", False),
            getattr(args, "use_opd", False),
            getattr(args, "use_routing_replay", False) and not replays_engine_routing,
            args.advantage_estimator == "gspo",
            getattr(args, "custom_advantage_function_path", None) is not None,
            getattr(args, "use_rollout_entropy", False),
            getattr(args, "attention_dropout", 0) != 0,
            getattr(args, "hidden_dropout", 0) != 0,
        ]
    )
