"""Forward passes before the steps: log-probs of reference, teacher and old policy, and the call of the schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.algorithms.log_probs import Vocabulary
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.rules.checkpoints import needs_teacher
from slime.backends.megatron_utils.lora.adapter import adapters_off
from slime.backends.megatron_utils.model.mtp_loss import mtp_targets, trains_mtp
from slime.backends.megatron_utils.state.parallel import (
    context_parallel,
    data_parallel,
    is_last_stage,
    tensor_parallel,
    unwrap,
)
from slime.backends.megatron_utils.train.balancing import Balancing
from slime.backends.megatron_utils.train.cp_utils import (
    ResponseLayout,
    response_rows_and_targets,
    slice_samples_with_cp,
)
from slime.backends.megatron_utils.train.data import (
    LossBatch,
    RolloutData,
    micro_batch_iterators,
    model_inputs,
    num_samples,
    steps_of,
)
from slime.backends.megatron_utils.train.hooks import TrainerHooks
from slime.backends.megatron_utils.train.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.train.response_logits import TOP_P_COLUMNS, packed_row
from slime.backends.megatron_utils.train.routing_replay import RoutingReplay
from slime.backends.megatron_utils.train.weight_backup import OLD_ACTOR, TEACHER, WeightBackup
from slime.batching.log_prob_requests import LogProbReply, LogProbShard
from slime.batching.ragged_tensor import RaggedTensor, flat
from slime.models.shape import logit_cap
from slime.observability.timer import timer

Finish = Callable[..., Any]


"""From the model's output to what the schedule expects: a loss and its report, or collected data."""


def run_schedule(
    args: Args,
    model: Sequence[torch.nn.Module],
    data: RolloutData,
    micro_batches: list[list[int]],
    finish: Callable[[dict[str, Any]], Finish],
    *,
    forward_only: bool,
    routing: RoutingReplay | None = None,
    balancing: Balancing | None = None,
) -> list[Any]:
    """Run ``micro_batches`` (lists of local sample positions) through ``model``, backward too unless ``forward_only``.

    ``finish(batch)`` returns the function of the output for that micro-batch. Returns what those functions reported,
    one entry per micro-batch on the last pipeline stage, nothing elsewhere; with ``forward_only`` what they
    returned, as non-loss data. ``routing`` and ``balancing`` are given the batch of each forward pass.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[LossBatch], chunk: torch.nn.Module, return_schedule_plan: bool = False) -> Any:
        batch = next(iterator)
        takes_pixels = getattr(unwrap(chunk), "takes_pixels", None)  # None: a model that is not slime's
        inputs = model_inputs(batch, pixels=takes_pixels is not False, distinct=bool(takes_pixels))
        if not forward_only and trains_mtp(args) and hasattr(unwrap(chunk), "mtp"):
            inputs["mtp_targets"] = batch.mtp_targets = mtp_targets(args, batch)
        batch.overwrite_logits = _needs_no_logits(chunk)
        if may_round_logits(args, chunk):
            inputs["fp32_output"] = False
        with ExitStack() as stack:
            for part in (routing, balancing):
                if part is not None:
                    stack.enter_context(part.forward(batch))
            output = chunk(**inputs)
        return output, finish(batch)

    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=micro_batch_iterators(args, data, micro_batches, len(model)),
        model=list(model),
        num_microbatches=len(micro_batches),
        seq_length=args.seq_length or 1,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    forget_last_tokens(model)
    return reports


_OF_LAST_TOKENS = (
    "probs",
    "local_probs",
    "routing_map",
    "token_probs",
    "token_indices",
    "dispatched_probs",
    "dispatched_indices",
    "dispatched_routing_map",
)


def forget_last_tokens(model: Sequence[torch.nn.Module]) -> None:
    """Remove what the token dispatchers of experts keep of their last micro-batch.

    Probabilities lead, through autograd's graph, to the recomputed input of their layer and to its gradient: those of
    all layers would stay while the optimizer steps, and while the trainer is offloaded.
    """
    for module in (module for chunk in model for module in chunk.modules()):
        dispatcher = getattr(module, "token_dispatcher", None)
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", None)):  # the second is DeepEP's
            for name in _OF_LAST_TOKENS:
                if torch.is_tensor(getattr(owner, name, None)):
                    setattr(owner, name, None)


def _needs_no_logits(chunk: torch.nn.Module) -> bool:
    """Return whether the model declares a backward pass that does not read its output; a user's may end in a tanh."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    model: Any = chunk
    while isinstance(model, DistributedDataParallel | Float16Module):  # not a wrapper of the user's
        model = model.module
    return getattr(model, "logits_may_be_overwritten", False)


def may_round_logits(args: Args, chunk: torch.nn.Module) -> bool:
    """Return whether the logits may stay in the 16 bits in which the model computes them.

    slime's losses make fp32 numbers of a chunk at a time. A user's loss, and top-p masks, get fp32 logits.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.module import Float16Module

    model: Any = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
    return isinstance(model, Float16Module) and args.loss_type != "custom_loss" and args.rollout_top_p == 1.0


@torch.no_grad()
def forward_only(
    args: Args,
    model: Sequence[torch.nn.Module],
    data: RolloutData,
    collect: Callable[..., tuple[Tensor, dict[str, list[Tensor]]]],
    hooks: TrainerHooks,
    *,
    store_prefix: str = "",
    routing: RoutingReplay | None = None,
    columns: Mapping[str, str] | None = None,
) -> dict[str, RaggedTensor]:
    """Run ``model`` over all samples of this rank and return what ``collect`` makes of the logits.

    ``collect`` has the signature of ``loss.get_log_probs_and_entropy``. The result maps ``store_prefix + name`` to a
    column in the CP-local layout, in the order of ``data``; it is empty except on the last pipeline stage.
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

    # The passes have no optimizer step between them: all steps' micro-batches make one long pipeline.
    micro_batches = [indices for step in steps_of(data) for indices in step]
    results = run_schedule(args, model, data, micro_batches, collecting, forward_only=True, routing=routing)
    for chunk in model:
        chunk.train()
    if not is_last_stage():
        return {}
    collected: dict[str, list[Any]] = {}
    for indices, (_, values) in zip(micro_batches, results, strict=True):
        for name, tensors in values.items():
            column = collected.setdefault(store_prefix + name, [None] * num_samples(data))
            for index, tensor in zip(indices, tensors, strict=True):
                column[index] = tensor
    return {name: RaggedTensor.of(column) for name, column in collected.items()}


def old_log_probs_equal_current(args: Args, data: RolloutData) -> bool:
    """Return whether the separate old log-prob pass can be left out because its result is known.

    With one optimizer step per rollout the policy that is differentiated *is* the old policy, so its detached
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
            *(getattr(args, flag.dest, None) for flag in flags_where(lambda traits: traits.random)),
        ]
    )


LABELS, DRAWS = "label_token_ids", "random_numbers"
COLUMNS = {LABELS: "labels", DRAWS: "draws"}
"""Columns of a batch -> keywords of ``_collect``."""


def served_log_probs(
    args: Args, model: Sequence[torch.nn.Module], shards: Sequence[LogProbShard], hooks: TrainerHooks
) -> tuple[int, list[LogProbReply]] | None:
    """Return this data-parallel rank and the replies to the requests of its shard, in order; None on all but one of
    the ranks that have computed them.

    All log-probs are at ``--rollout-temperature``. Collective.
    """
    dp_rank, device = data_parallel().rank, next(model[0].parameters()).device
    shard = shards[dp_rank]
    requests = shard.requests
    lengths = [len(request.tokens) for request in requests]
    data: dict[str, Any] = {
        "tokens": RaggedTensor.of([torch.from_numpy(request.tokens).to(device) for request in requests]),
        "total_lengths": lengths,
        "response_lengths": [length - 1 for length in lengths],
        "num_microbatches": [len(shard.micro_batch_indices)],
        "micro_batch_indices": shard.micro_batch_indices,
    }
    # Rows of a column are equally wide: what is beyond a request's own labels and draws is cut off below.
    if wide := max(request.labels.shape[1] for request in requests):
        data[LABELS] = RaggedTensor.of([_as_wide(torch.from_numpy(r.labels), wide).to(device) for r in requests])
    if wide := max(request.draws for request in requests):
        numbers = [_random_numbers(len(r.tokens) - 1, r.draws, r.seed) for r in requests]
        data[DRAWS] = RaggedTensor.of([_as_wide(row, wide).to(device) for row in numbers])
    columns = forward_only(args, model, data, _collect, hooks, columns=COLUMNS)
    if not columns:
        return None
    layout = ResponseLayout.of(data)
    whole = {name: [values.cpu().numpy() for values in layout.whole(column)] for name, column in columns.items()}
    if tensor_parallel().rank or context_parallel().rank:
        return None
    nothing = [np.empty((length - 1, 0), dtype=np.float32) for length in lengths]
    return dp_rank, [
        LogProbReply(
            whole["log_probs"][i],
            whole.get("label_log_probs", nothing)[i][:, : request.labels.shape[1]],
            whole.get("sampled_ids", nothing)[i][:, : request.draws],
            whole.get("sampled_log_probs", nothing)[i][:, : request.draws],
        )
        for i, request in enumerate(requests)
    ]


def _as_wide(rows: Tensor, width: int) -> Tensor:
    """Return ``rows`` [n, k] with zeros up to ``width`` columns."""
    return torch.nn.functional.pad(rows, (0, width - rows.size(1)))


def _random_numbers(rows: int, draws: int, seed: int) -> Tensor:
    """Return float64 [rows, draws] in [0, 1), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(rows, draws, dtype=torch.float64, generator=generator)


def _collect(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    labels: Sequence[Tensor] | None = None,
    draws: Sequence[Tensor] | None = None,
    non_loss_data: bool = True,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return what ``get_log_probs_and_entropy`` does without entropy, and columns about ``labels`` and ``draws``."""
    cut = (total_lengths, response_lengths)
    nothing, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=unconcat_tokens,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        non_loss_data=non_loss_data,
    )
    row = packed_row(logits)
    rows, _, sizes = response_rows_and_targets(unconcat_tokens, *cut)
    tp, width = tensor_parallel(), row.size(1)
    real = width if args.vocab_size is None else min(max(args.vocab_size - tp.rank * width, 0), width)
    vocabulary = Vocabulary(tp.rank * width, real, args.rollout_temperature, tp.group, logit_cap(args))
    if labels is not None:
        wanted = flat(slice_samples_with_cp(labels, *cut))
        of_labels = vocabulary.log_probs(row, rows, wanted, args.teacher_label_reduction_chunk_size)
        found["label_log_probs"] = list(of_labels.split(sizes))
    if draws is not None:
        numbers = flat(slice_samples_with_cp(draws, *cut))
        ids, of_draws = vocabulary.sample(row, rows, numbers, args.teacher_sample_reduction_chunk_size)
        found |= {"sampled_ids": list(ids.split(sizes)), "sampled_log_probs": list(of_draws.split(sizes))}
    return nothing, found


ACTOR, REFERENCE = "actor", "ref"


logger = logging.getLogger(__name__)


def drop_precomputed_logprobs(data: RolloutData, *, teacher: bool = False) -> None:
    """Remove columns that came with the samples under the names of the passes' own (a ``teacher``'s if there is one).

    Where the pass for ``log_probs`` is left out, such a column would be taken for the old policy.
    """
    names = ["log_probs", "entropy", "ref_log_probs", "ref_entropy"]
    names += ["teacher_log_probs", "teacher_entropy"] if teacher else []
    if given := [name for name in names if data.pop(name, None) is not None]:
        logger.warning("left out of the train data: %s; the trainer computes what has these names", ", ".join(given))


class LogProbPasses:
    """Adds the columns that come from forward passes with the weights of ``backup``'s tags, as far as they are needed.

    Every method is collective; the columns appear on the last pipeline stage.
    """

    def __init__(
        self,
        args: Args,
        model: Sequence[torch.nn.Module],
        backup: WeightBackup,
        hooks: TrainerHooks,
        *,
        with_ref: bool,
        routing: RoutingReplay,
    ) -> None:
        self.args, self.model, self.hooks, self._routing = args, model, hooks, routing
        self._backup = backup
        self._others = {REFERENCE: "ref_"} if with_ref else {}
        if needs_teacher(args):
            self._others[TEACHER] = "teacher_"
        self._old_policy = OLD_ACTOR if args.keep_old_actor else ACTOR

    def add_to(self, data: RolloutData) -> None:
        """Add ``ref_log_probs``, ``teacher_log_probs`` and ``log_probs`` (and entropies when asked for) as needed.

        The weights of the actor are in the model again afterwards, unchanged to the bit, also after an error.
        """
        drop_precomputed_logprobs(data, teacher=TEACHER in self._others)
        passes = dict(self._others)
        if self._needs_old_policy(data):
            passes[self._old_policy] = ""
        if any(tag != ACTOR and not self._is_base(tag) for tag in passes):
            self._backup.save(ACTOR)
        try:
            for tag, prefix in passes.items():
                with timer(f"{prefix}log_probs"), self._policy(tag):
                    with self._routing.old_policy() if tag == self._old_policy else nullcontext():
                        data.update(self._forward_only(data, prefix))
        finally:
            self._backup.activate(ACTOR)

    def _is_base(self, tag: str) -> bool:
        """Return whether the policy is the actor without its adapters."""
        return tag == REFERENCE and bool(self.args.lora_rank)

    @contextmanager
    def _policy(self, tag: str) -> Iterator[None]:
        base = self._is_base(tag)
        self._backup.activate(ACTOR if base else tag)
        with adapters_off(self.model) if base else nullcontext():
            yield

    def _needs_old_policy(self, data: RolloutData) -> bool:
        args = self.args
        records_routing = args.use_routing_replay and not args.use_rollout_routing_replay
        if args.use_rollout_entropy or records_routing:
            return True
        mismatch = args.get_mismatch_metrics
        if args.use_rollout_logprobs and not mismatch:
            return False  # the engines' log-probs are the old ones
        return not old_log_probs_equal_current(args, data)

    def _forward_only(self, data: RolloutData, prefix: str) -> dict[str, RaggedTensor]:
        def collect(*inputs: Any, **keywords: Any) -> Any:
            with_entropy = self.args.use_rollout_entropy
            return get_log_probs_and_entropy(*inputs, with_entropy=with_entropy, **keywords)

        return forward_only(
            self.args,
            self.model,
            data,
            collect,
            self.hooks,
            store_prefix=prefix,
            routing=self._routing,
            columns=TOP_P_COLUMNS,
        )
