"""The trainer's log-probs of a fixed prompt, which engines are compared with after the first push of weights."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
from slime.backends.megatron_utils.hooks import TrainerHooks
from slime.backends.megatron_utils.parallel import pipeline_parallel
from slime.backends.megatron_utils.passes import forward_only
from slime.backends.megatron_utils.response_logits import get_log_probs_and_entropy
from slime.batching.ragged_tensor import RaggedTensor


def canary_log_probs(
    args: Namespace, model: Sequence[torch.nn.Module], tokens: Sequence[int], device: torch.device
) -> list[float] | None:
    """Return log p(token | those before it) of ``tokens[1:]``, without temperature and top-p.

    None except on the last pipeline stage. Collective: every data-parallel rank computes the same.
    """
    # Virtual pipeline stages take micro-batches in groups of this size.
    copies = args.microbatch_group_size_per_vp_stage or pipeline_parallel().size if len(model) > 1 else 1
    total, response = len(tokens), len(tokens) - 1
    data = {
        "tokens": RaggedTensor.of([torch.tensor(tokens, device=device)] * copies),
        "total_lengths": [total] * copies,
        "response_lengths": [response] * copies,
        "num_microbatches": [copies],
        "micro_batch_indices": [[position] for position in range(copies)],
    }
    collect = partial(get_log_probs_and_entropy, apply_temperature=False)
    columns = forward_only(args, model, data, collect, TrainerHooks())
    if not columns:
        return None
    log_probs: list[float] = all_gather_with_cp(columns["log_probs"][0], total, response).tolist()
    return log_probs
