"""Forward passes without gradients: log-probs and entropies of all samples of a rollout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slime.backends.megatron_utils.data import RolloutData, num_samples, steps_of
from slime.backends.megatron_utils.hooks import TrainerHooks
from slime.backends.megatron_utils.parallel import is_last_stage
from slime.backends.megatron_utils.routing_replay import RoutingReplay
from slime.backends.megatron_utils.schedule_call import run_schedule

_RANDOM_IN_TRAINING = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")


@torch.no_grad()
def forward_only(
    args: Namespace,
    model: Sequence[torch.nn.Module],
    data: RolloutData,
    collect: Callable[..., tuple[Tensor, dict[str, list[Tensor]]]],
    hooks: TrainerHooks,
    *,
    store_prefix: str = "",
    routing: RoutingReplay | None = None,
    columns: Mapping[str, str] | None = None,
) -> dict[str, list[Tensor]]:
    """Run ``model`` over all samples of this rank and return what ``collect`` makes of the logits.

    ``collect`` has the signature of ``loss.get_log_probs_and_entropy``. The result maps ``store_prefix + name`` to one
    tensor per sample in the CP-local layout, in the order of ``data``; it is empty except on the last pipeline stage.
    ``routing`` records or replays in the stage it is in. ``columns``: further columns that ``collect`` takes, where
    they exist, and under which keyword.
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
            **{keyword: batch[name] for name, keyword in (columns or {}).items() if batch.get(name) is not None},
        )

    # The passes have no optimiser step between them: all steps' micro-batches make one long pipeline.
    micro_batches = [indices for step in steps_of(data) for indices in step]
    results = run_schedule(args, model, data, micro_batches, collecting, forward_only=True, routing=routing)
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
    log-probs are the old ones, to the bit (ratio 1). That must not hold, or the numbers be wanted before the step, for:
    KL in the reward, distillation, old weights, routing that the pass records, the user's loss, advantages, data
    post-processing or hooks around pass and step, the entropy of the pass, dumps of its columns, assertions and traces
    of it, and what is random in the step and off in the pass.
    """
    replays_engine_routing = args.use_rollout_routing_replay
    return len(data["num_microbatches"]) == 1 and not any(
        [
            args.loss_type == "custom_loss",
            args.kl_coef != 0,
            args.use_opd,
            args.keep_old_actor,
            args.use_routing_replay and not replays_engine_routing,
            args.custom_advantage_function_path is not None,
            args.rollout_data_postprocess_path is not None,
            args.custom_megatron_before_log_prob_hook_path is not None,
            args.custom_megatron_before_train_step_hook_path is not None,
            args.use_rollout_entropy,
            args.save_debug_train_data is not None,
            args.ci_test,
            "train_log_probs" in (args.profile_target or ()),
            *(getattr(args, name, None) for name in _RANDOM_IN_TRAINING),
        ]
    )
