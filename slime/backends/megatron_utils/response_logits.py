"""From a packed row of logits to what belongs to the response tokens: logits, log-probs, entropies."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.log_probs import log_probs_and_entropy
from slime.algorithms.nucleus import nucleus_log_probs
from slime.backends.megatron_utils.cp_utils import response_rows_and_targets
from slime.backends.megatron_utils.nuclei import local_nuclei
from slime.backends.megatron_utils.parallel import tensor_parallel

# Operations of autograd, by the name of their node.
_VIEWS = (
    "AliasBackward",
    "SqueezeBackward",
    "TransposeBackward",
    "UnsafeViewBackward",
    "UnsqueezeBackward",
    "ViewBackward",
)
_KEEP_THEIR_INPUT_ONLY = (
    "LinearWithGradAccumulationAndAsyncCommunicationBackward",
    "LinearWithFrozenWeightBackward",
    "ToCopyBackward",
    "AddmmBackward",
    "BmmBackward",
    "MmBackward",
)


def get_responses(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None = None,
    apply_temperature: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield per sample (logits [n, V_local] float32, tokens [n] they predict).

    ``logits`` is [1, T_local, V_local]; n counts the response tokens whose logits this rank holds and may be 0. They
    are divided by ``args.rollout_temperature`` unless ``apply_temperature`` is False. ``max_seq_lens`` has no effect:
    it is of samples in a padded row each, which ``packed_row`` refuses. This copies logits: for log-probs use
    ``get_log_probs_and_entropy``, which does not.
    """
    row = packed_row(logits)
    rows, targets, sizes = response_rows_and_targets(unconcat_tokens, total_lengths, response_lengths)
    temperature = args.rollout_temperature if apply_temperature else 1.0
    for sample_rows, sample_targets in zip(rows.split(sizes), targets.split(sizes), strict=True):
        yield row[sample_rows].float() / temperature, sample_targets


def packed_row(outputs: Tensor) -> Tensor:
    """Return [T_local, ...] of a model's ``outputs`` [1, T_local, ...]; raises ValueError for more than one row."""
    if outputs.dim() != 3 or outputs.size(0) != 1:
        raise ValueError(
            f"expected the outputs of one row of packed samples, [1, T, ...], got {tuple(outputs.shape)}: samples in a "
            "row each, padded to max_seq_lens, are not supported"
        )
    return outputs.squeeze(0)


def get_log_probs_and_entropy(
    logits: Tensor,
    *,
    args: Namespace,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    apply_temperature: bool = True,
    with_entropy_grad: bool | None = None,
    top_p_token_ids: Sequence[Tensor] | None = None,
    top_p_token_offsets: Sequence[Tensor] | None = None,
    overwrite_logits: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return (empty tensor, {"log_probs": [...], "entropy": [...]}), one float32 tensor [n_local] per sample.

    ``logits`` [1, T_local, V_local] are divided by ``args.rollout_temperature`` unless ``apply_temperature`` is False;
    the vocabulary may be split over the tensor-parallel group; padding columns past ``args.vocab_size`` have
    probability 0. The entropy carries a gradient ``with_entropy_grad``, by default when ``args.entropy_coef`` is not 0.
    ``max_seq_lens`` as in ``get_responses``. With the nuclei that the response tokens were sampled among (per sample
    ids [k] and offsets [response_length + 1]) log-probs are those among them; the entropy is of all. The pair has the
    form of Megatron's loss functions, so this can be passed to its schedules; ``non_loss_data`` is what they pass and
    has no effect. With ``overwrite_logits``, for callers that do nothing else with the logits, their gradient takes
    their place in memory.
    """
    del non_loss_data, max_seq_lens
    row = packed_row(logits)
    rows, targets, sizes = response_rows_and_targets(unconcat_tokens, total_lengths, response_lengths)
    temperature = args.rollout_temperature if apply_temperature else 1.0
    if with_entropy_grad is None:
        with_entropy_grad = args.entropy_coef != 0
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    if top_p_token_ids is not None and top_p_token_offsets is not None:
        log_probs = nucleus_log_probs(
            row,
            targets,
            local_nuclei(top_p_token_ids, top_p_token_offsets, total_lengths, response_lengths),
            rows=rows,
            tp_group=tensor_parallel().group,
            temperature=temperature,
        )
    if log_probs is None or with_entropy:
        whole, entropy = log_probs_and_entropy(
            row,
            targets,
            rows=rows,
            tp_group=tensor_parallel().group,
            vocab_size=args.vocab_size,
            chunk_size=args.log_probs_chunk_size,
            temperature=temperature,
            with_entropy=with_entropy,
            entropy_grad=with_entropy_grad,
            overwrite_logits=overwrite_logits and log_probs is None and _not_needed_by_their_maker(logits),
        )
        log_probs = whole if log_probs is None else log_probs
    result = {"log_probs": list(log_probs.split(sizes))}
    if entropy is not None:
        result["entropy"] = list(entropy.split(sizes))
    return torch.empty(0, device=logits.device), result


def _not_needed_by_their_maker(logits: Tensor) -> bool:
    """Return whether ``logits`` come from an operation whose backward does not read its result, as a tanh's would.

    So they do from Megatron's output layer; a model of one's own may end in anything.
    """
    node = logits.grad_fn
    while node is not None and node.name().rstrip("0123456789") in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name().rstrip("0123456789") in _KEEP_THEIR_INPUT_ONLY


def note_finite_samples(batch: dict[str, Any], *columns: Sequence[Tensor]) -> None:
    """Set ``batch["finite_samples"]`` (bool [samples]): whether all of a sample's values in ``columns`` are finite.

    Read only when a step turns out not to be finite, to name the samples.
    """
    flags = [torch.stack([torch.isfinite(values).all() for values in column]) for column in columns]
    batch["finite_samples"] = torch.stack(flags).all(dim=0).detach()
