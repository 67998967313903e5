"""Even load on experts: the router's own losses, and the biases that steer its choice.

Megatron computes both over the rows of a micro-batch, padding included, and takes a packed row for one sequence. Here
they are computed from what the routers put out, over the tokens of samples alone: with E experts, of which every token
is sent to the K with the highest scores s_te (softmax, or sigmoid divided by its sum), and over tokens t of a set of
size T

    L = E * sum_e f_e P_e,  f_e = (how many tokens choose e) / (K T),  P_e = sum_t s_te / T

(https://arxiv.org/abs/2101.03961). ``aux_loss`` is the mean of L over the micro-batches of a step, ``seq_aux_loss``
that over its samples (https://arxiv.org/abs/2412.19437), ``z_loss`` the mean over micro-batches of the mean over tokens
of ``logsumexp(logits_t)^2`` (https://arxiv.org/abs/2202.08906), each summed over layers. Their sum, times the
coefficients, is added to the loss of the step. Only P and the logits are differentiated. The choice is the one that the
scores alone would make: biases, groups of experts and routing replay change where tokens go, not what is balanced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.algorithms.reducers import num_trained_tokens
from slime.arguments.args import Args
from slime.backends.megatron_utils.model.mtp_loss import trains_mtp
from slime.backends.megatron_utils.state.parallel import context_parallel, data_parallel, gather_from_world
from slime.backends.megatron_utils.train.data import RolloutData, rows_of_batch

if TYPE_CHECKING:
    from megatron.core.transformer.moe.router import TopKRouter

AUX, SEQ_AUX, Z = "aux_loss", "seq_aux_loss", "z_loss"
METRICS = {AUX: "load_balancing_loss", SEQ_AUX: "seq_load_balancing_loss", Z: "z_loss"}
"""Kinds of losses -> the names that Megatron logs them under."""


def coefficients(args: Args) -> dict[str, float]:
    """Return kind of loss -> coefficient of those that are switched on."""
    kinds, values = args.moe_router_load_balancing_type, args.moe_aux_loss_coeff
    kinds = [kinds] if isinstance(kinds, str) else kinds
    values = values if isinstance(values, list | tuple) else [values]
    pairs: list[tuple[str, float | None]] = [*zip(kinds, values, strict=True), (Z, args.moe_z_loss_coeff)]
    return {kind: float(value) for kind, value in pairs if kind in METRICS and value}


@dataclass(frozen=True)
class _Step:
    """Divisors and scale of the losses of an optimizer step.

    micro_batches: of all data-parallel ranks together. samples: likewise. scale: what a loss is multiplied by so that
    Megatron's scaling of auxiliary losses and of gradients makes the mean over micro-batches of it.
    """

    micro_batches: int
    samples: int
    scale: float


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a micro-batch on this rank.

    sample: int64 [tokens], which sample of the micro-batch each belongs to, -1 for padding. lengths: fp32 [samples],
    tokens on all ranks.
    """

    sample: Tensor
    lengths: Tensor


class Balancing:
    """The routers of one rank, and what keeps their choices even. Without routers every method does nothing.

    ``routers`` maps numbers of layers to Megatron's ``TopKRouter`` modules, whose own losses and counts of tokens are
    switched off.
    ``weights`` maps kinds of losses to coefficients; ``layers`` are the numbers of the layers with routers, of all
    pipeline stages, in order.
    """

    def __init__(
        self,
        routers: Mapping[int, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        *,
        layers: Sequence[int] = (),
        sequence_parallel: bool = False,
        per_layer: bool = False,
        per_token: bool = False,
    ) -> None:
        self._routers, self._weights = dict(routers or {}), dict(weights or {})
        self._columns = {number: column for column, number in enumerate(layers)}
        self._sequence_parallel, self._per_layer, self._per_token = sequence_parallel, per_layer, per_token
        self._step: _Step | None = None
        self._current: _Tokens | None = None
        self._waiting: dict[int, deque[_Tokens]] = {number: deque() for number in self._routers}
        self._sums: Tensor | None = None  # fp32 [kinds, layers]: this rank's parts of the means over the step
        self._biases: list[Tensor] = []
        for number, router in self._routers.items():
            # Leave the losses and counts of a ``TopKRouter`` to this module.
            config = router.config
            given = config.moe_aux_loss_coeff
            config.moe_aux_loss_coeff = [0.0] * len(given) if isinstance(given, list) else 0.0
            config.moe_z_loss_coeff = None
            router._apply_expert_bias = lambda *args, **kwargs: None
            router.routing = self._balanced(number, router, router.routing)

    @contextmanager
    def step(self, data: RolloutData, micro_batches: list[list[int]]) -> Iterator[None]:
        """The body is the forwards and backwards of the optimizer step over ``micro_batches``. Collective."""
        if not self._columns:
            yield
            return
        self._step = self._measured(data, micro_batches)
        self._biases = []
        for router in self._with_bias():
            self._biases.append(router.expert_bias.clone())
            router.local_tokens_per_expert.zero_()  # a step that failed on its way has counted some
        device = data["loss_masks"][0].device
        self._sums = torch.zeros(len(self._weights), len(self._columns), dtype=torch.float32, device=device)
        try:
            yield
        finally:
            self._step = None
            for waiting in self._waiting.values():
                waiting.clear()

    def undo(self) -> None:
        """Give the biases back what they were before the step, whose update is not made."""
        for router, bias in zip(self._with_bias(), self._biases, strict=True):
            router.expert_bias.copy_(bias)

    @contextmanager
    def forward(self, batch: dict[str, Any]) -> Iterator[None]:
        """The body is the forward of a model chunk over ``batch``."""
        if self._step is None or not self._routers:
            yield
            return
        device = batch["tokens"].device
        rows = rows_of_batch(batch, sequence_parallel=self._sequence_parallel)
        lengths = torch.tensor(batch["total_lengths"])
        sample = torch.bucketize(rows, lengths.cumsum(0), right=True)
        sample = torch.where(rows < 0, -1, sample)
        self._current = _Tokens(sample.to(device), lengths.to(device, torch.float32))
        try:
            yield
        finally:
            self._current = None

    def step_metrics(self) -> dict[str, float]:
        """Return the losses of the last step, without coefficients: means over layers, and per layer when asked for.

        Collective over all ranks; empty when no loss is on.
        """
        if not self._weights or self._sums is None:
            return {}
        dist.all_reduce(self._sums)  # ranks hold other tokens, or other layers
        metrics = {}
        for kind, by_layer in zip(self._weights, self._sums.tolist(), strict=True):
            metrics[METRICS[kind]] = sum(by_layer) / len(by_layer)
            if self._per_layer:
                named = zip(self._columns, by_layer, strict=True)
                metrics |= {f"moe/{METRICS[kind]}_layer_{number - 1}": value for number, value in named}
        self._sums = None
        return metrics

    def _measured(self, data: RolloutData, micro_batches: list[list[int]]) -> _Step:
        cp, dp = context_parallel(), data_parallel()
        trained = [num_trained_tokens([data["loss_masks"][i] for i in batch]) for batch in micro_batches]
        samples = sum(len(batch) for batch in micro_batches)
        counts = torch.stack([torch.stack(trained).sum(), torch.full_like(trained[0], samples)])
        if dp.size > 1:
            dist.all_reduce(counts, group=dp.group)
        tokens, samples = counts.tolist()
        total = len(micro_batches) * dp.size
        # Per token, gradients are divided by the tokens, if there are any, which every context-parallel rank counts.
        return _Step(total, samples, scale=cp.size * max(tokens, 1) / total if self._per_token else 1.0)

    def _with_bias(self) -> list[Any]:
        return [router for router in self._routers.values() if router.expert_bias is not None]

    def _balanced(
        self, number: int, router: TopKRouter, plain: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., Any]:
        """Return the router's ``routing`` for the forwards of a step: (probs, routing map), both [tokens, experts]."""

        def routing(logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
            probs, routing_map = plain(logits, *args, **kwargs)
            if self._step is None:  # a pass that nothing is learned from
                return probs, routing_map
            recomputing = self._current is None
            if recomputing and not self._waiting[number]:  # a forward of other code
                return probs, routing_map
            tokens = self._waiting[number].popleft() if recomputing else self._current
            assert tokens is not None
            if not torch.is_grad_enabled():  # its activations are not kept: it is recomputed in the backward pass
                self._waiting[number].append(tokens)
                return probs, routing_map
            if router.expert_bias is not None:
                router.local_tokens_per_expert += routing_map[tokens.sample >= 0].sum(dim=0)
            return self._with_losses(number, probs, logits.flatten(0, -2).float(), tokens), routing_map

        return routing

    def _with_losses(self, number: int, probs: Tensor, logits: Tensor, tokens: _Tokens) -> Tensor:
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        assert self._step is not None
        if not self._weights:
            return probs
        losses = router_losses(self._weights, logits, tokens.sample, tokens.lengths, self._routers[number])
        if SEQ_AUX in losses:
            losses[SEQ_AUX] = losses[SEQ_AUX] * (self._step.micro_batches / self._step.samples)
        values = torch.stack([losses[kind] for kind in self._weights])
        if self._sums is not None:
            self._sums[:, self._columns[number]] += values.detach() / self._step.micro_batches
        total = values @ values.new_tensor(list(self._weights.values()))
        return MoEAuxLossAutoScaler.apply(probs, total * self._step.scale)


def router_losses(
    kinds: Collection[str], logits: Tensor, sample: Tensor, lengths: Tensor, router: TopKRouter
) -> dict[str, Tensor]:
    """Return this rank's parts of the losses of one layer over one micro-batch; ``seq_aux_loss`` is a sum of samples.

    logits: fp32 [tokens, experts]. sample, lengths: as in ``_Tokens``. router: has ``topk``, ``score_function`` and
    the group ``tp_cp_group`` over which tokens are divided.
    """
    valid = sample >= 0
    logits, sample = logits[valid], sample[valid]
    total, losses = lengths.sum(), {}
    if Z in kinds:
        losses[Z] = logits.logsumexp(dim=-1).square().sum() / total
    if AUX not in kinds and SEQ_AUX not in kinds:
        return losses
    if router.score_function == "sigmoid":
        scores = logits.sigmoid()
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    else:
        scores = logits.softmax(dim=-1)
    experts, topk = logits.size(-1), router.topk
    with torch.no_grad():
        chosen = torch.zeros_like(scores).scatter_(1, scores.topk(topk, dim=1).indices, 1.0)
        counts = scores.new_zeros(len(lengths), experts).index_add_(0, sample, chosen)
        if router.tp_cp_group.size() > 1:
            dist.all_reduce(counts, group=router.tp_cp_group)
    if AUX in kinds:
        losses[AUX] = (scores.sum(dim=0) * counts.sum(dim=0)).sum() * (experts / (topk * total**2))
    if SEQ_AUX in kinds:
        loads = counts / (topk * lengths[:, None])
        losses[SEQ_AUX] = ((scores * loads[sample]).sum(dim=1) / lengths[sample]).sum() * experts
    return losses


def build_balancing(args: Args, model: Sequence[torch.nn.Module]) -> Balancing:
    """Return what the flags ask for ``model`` (list of chunks): losses of routers, biases of experts, or neither.

    Collective. Raises ValueError for losses without a router that could have them.
    """
    weights = coefficients(args)
    biased = args.moe_router_enable_expert_bias
    if args.num_experts is None or not (weights or biased):
        return Balancing()
    from megatron.core.transformer.moe.router import TopKRouter

    routers = {}
    for name, module in (found for chunk in model for found in chunk.named_modules()):
        if not isinstance(module, TopKRouter):
            continue
        is_mtp = ".mtp." in f".{name}"
        if is_mtp and not trains_mtp(args):  # these layers do not run: no load to even, and none for the means
            continue
        # Megatron counts layers of multi-token prediction from 1 again.
        routers[int(module.layer_number or 0) + is_mtp * args.num_layers] = module
    layers = sorted({number for part in gather_from_world(list(routers)) for number in part})
    if weights and not layers:
        raise ValueError(
            "--moe-aux-loss-coeff, --moe-z-loss-coeff: the model has no megatron TopKRouter to balance; leave them "
            "out, or let the layers of --spec route with megatron.core.transformer.moe.router.TopKRouter"
        )
    return Balancing(
        routers,
        weights,
        layers=layers,
        sequence_parallel=args.sequence_parallel,
        per_layer=args.moe_per_layer_logging,
        per_token=args.calculate_per_token_loss,
    )
