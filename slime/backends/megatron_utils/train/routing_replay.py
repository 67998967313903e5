"""Routing replay: training steps send every token to the experts that an earlier pass chose for it.

A mixture of experts is discontinuous where a token changes experts. With ``--use-routing-replay`` the choice of the
log-prob pass is recorded and every training forward (and the recomputation in its backward) repeats it, so that old and
new log-probs differ by the weights alone. With ``--use-rollout-routing-replay`` (R3, https://arxiv.org/abs/2510.11370)
both take the choice of the engine that generated the tokens. Only the choice is fixed: the probabilities that weigh the
experts' outputs are those of the current router, and its gradient flows through them.

Megatron asks an object of ours for the top-k of every router (its attribute ``router_replay``).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.train.data import rows_of_batch
from slime.batching.routed_experts import has_successor, rows_of_experts

FALLTHROUGH, RECORD, REPLAY_FORWARD, REPLAY_BACKWARD = "fallthrough", "record", "replay_forward", "replay_backward"
STAGE_VARIABLE = "ROUTING_REPLAY_STAGE"
"""The environment variable that says to a user's layers which of the stages above is active."""

MicroBatch = tuple[int, ...]
"""The local positions of its samples: what names a micro-batch in every pass of a rollout."""


class RoutingReplay:
    """The routers of one rank and what was chosen in them. Without routers every method does nothing.

    ``routers`` are Megatron's ``TopKRouter`` modules in order of their layers. ``from_engines`` says whether the
    choices come with the rollout data (R3) instead of being recorded.
    """

    def __init__(self, args: Args, routers: Sequence[torch.nn.Module] = (), *, from_engines: bool = False) -> None:
        self._args = args
        self._from_engines = from_engines
        self._layers = [int(router.layer_number) - 1 for router in routers]  # type: ignore[arg-type]
        self._routers = [_Router(self, place) for place in range(len(routers))]
        for module, router in zip(routers, self._routers, strict=True):
            module.router_replay = router  # type: ignore[assignment]
        self._chosen: dict[MicroBatch, list[Tensor | None]] = {}
        self._training = False
        self._current: MicroBatch | None = None
        self._decided: Tensor | None = None
        self._counts: Tensor | None = None
        self.active = args.use_routing_replay
        self._set_stage(FALLTHROUGH)

    @contextmanager
    def old_policy(self) -> Iterator[None]:
        """The body is the log-prob pass of the old policy: record there, or replay what the engines chose."""
        with self._in_stage(REPLAY_FORWARD if self._from_engines else RECORD):
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """The body is training steps: replay in their forwards, and in the recomputation of their backwards."""
        self._training = True
        try:
            with self._in_stage(REPLAY_BACKWARD):
                yield
        finally:
            self._training = False
            for router in self._routers:
                router.to_recompute.clear()

    @contextmanager
    def forward(self, batch: dict[str, Any]) -> Iterator[None]:
        """The body is the forward of a model chunk over ``batch``."""
        if self._stage == FALLTHROUGH or not self._routers:
            yield
            return
        self._enter(batch)
        stage = self._stage
        self._set_stage(REPLAY_FORWARD if stage == REPLAY_BACKWARD else stage)
        try:
            yield
        finally:
            self._set_stage(stage)
            self._current = None

    @contextmanager
    def one_rollout(self) -> Iterator[None]:
        """The body trains on one rollout, whose choices are forgotten after it, also when it fails."""
        try:
            yield
        finally:
            self._chosen.clear()
            self._counts = None

    def step_metrics(self, device: torch.device) -> dict[str, float]:
        """Return, of the forwards since the last call, the share of replayed choices that the router had not made.

        A choice is one expert of one token in one layer; padding and last tokens, on which nothing depends, do not
        count. Collective over all ranks; empty without replay.
        """
        if not self.active:
            return {}
        counts = torch.zeros(2, dtype=torch.float64, device=device)
        if self._counts is not None:
            counts += self._counts
        self._counts = None
        dist.all_reduce(counts)
        differing, total = counts.tolist()
        return {"routing_replay_differing": differing / total if total else 0.0}

    @property
    def _num_experts(self) -> int:
        return self._args.num_experts or 0

    @contextmanager
    def _in_stage(self, stage: str) -> Iterator[None]:
        if not self.active:
            yield
            return
        self._set_stage(stage)
        try:
            yield
        finally:
            self._set_stage(FALLTHROUGH)

    def _set_stage(self, stage: str) -> None:
        self._stage = stage
        if self.active:
            os.environ[STAGE_VARIABLE] = stage

    def _enter(self, batch: dict[str, Any]) -> None:
        self._current = key = tuple(batch["sample_positions"])
        rows = rows_of_batch(batch, sequence_parallel=self._args.sequence_parallel)
        self._decided = has_successor(rows, batch["total_lengths"]).to(batch["tokens"].device)
        if key in self._chosen:
            return
        if self._from_engines:
            if batch.get("rollout_routed_experts") is None:
                raise ValueError(
                    "--use-rollout-routing-replay: the rollout data has no rollout_routed_experts. The engines report "
                    "them in meta_info.routed_experts; a custom rollout function must ask for them "
                    "(return_routed_experts, and with a router the label slime_return_routed_experts) and keep them "
                    "(Sample.append_response_tokens)"
                )
            experts = rows_of_experts(
                batch["rollout_routed_experts"], rows, self._layers, num_experts=self._num_experts
            )
            self._chosen[key] = [_kept(layer, self._num_experts, batch["tokens"].is_cuda) for layer in experts]
        elif self._stage == RECORD:
            self._chosen[key] = [None] * len(self._routers)

    def _choose(self, router: _Router, own_choice: Callable[[], tuple[Tensor, Tensor]], scores: Tensor) -> Any:
        recomputing = self._stage == REPLAY_BACKWARD
        if self._current is None and not recomputing:  # no pass, or a forward of other code within one
            return own_choice()
        place = router.place
        key = router.to_recompute.popleft() if recomputing else self._current
        if self._stage == RECORD:
            values, indices = own_choice()
            self._chosen[key][place] = _kept(indices, self._num_experts, indices.is_cuda)  # type: ignore[index]
            return values, indices
        chosen = self._chosen.get(key, [None] * len(self._routers))[place]  # type: ignore[arg-type]
        if chosen is None or len(chosen) != len(scores):
            raise RuntimeError(
                f"layer {self._layers[place] + 1}: routing replay has the experts of "
                f"{0 if chosen is None else len(chosen)} tokens for a forward over {len(scores)} (samples at local "
                f"positions {key}). They come from the log-prob pass of the same rollout, or from the engines"
            )
        indices = chosen.to(scores.device, non_blocking=True).long()
        if self._training and not recomputing:
            if not torch.is_grad_enabled():
                router.to_recompute.append(key)  # type: ignore[arg-type]
            with torch.no_grad():
                assert self._decided is not None
                differing = ~(indices[:, :, None] == own_choice()[1][:, None, :]).any(dim=-1)  # [tokens, topk]
                counts = torch.stack(
                    [(differing & self._decided[:, None]).sum(), self._decided.sum() * indices.size(1)]
                )
                self._counts = counts if self._counts is None else self._counts + counts
        return scores.gather(1, indices), indices


class _Router:
    """Value of Megatron's ``router.router_replay``.

    ``to_recompute`` holds the micro-batches whose forward kept no activations, oldest first: the order in which every
    pipeline schedule runs the backwards of one chunk, and so the order of their recomputation.
    """

    def __init__(self, owner: RoutingReplay, place: int) -> None:
        self._owner, self.place = owner, place
        self.to_recompute: deque[MicroBatch] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (scores of the chosen experts, their indices), both [tokens, topk]; ``scores`` [tokens, experts]."""
        assert default_compute_topk is not None

        def own_choice() -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        return self._owner._choose(self, own_choice, scores)


def _kept(indices: Tensor, num_experts: int, pinned: bool) -> Tensor:
    """Return a copy of expert indices in host memory, in the smallest type that holds them."""
    small = indices.to(torch.uint8 if num_experts <= 256 else torch.int16)
    copy = torch.empty(small.shape, dtype=small.dtype, pin_memory=pinned)
    return copy.copy_(small, non_blocking=True)


def build_routing_replay(args: Args, model: Sequence[torch.nn.Module]) -> RoutingReplay:
    """Return the replay for ``model`` (list of chunks) that ``--use-routing-replay`` asks for; else one that is inert.

    Layers of multi-token prediction route for themselves: neither the log-prob pass nor the engine's answer holds a
    choice for them. Collective. Raises ValueError for a model without a router that asks us.
    """
    if not args.use_routing_replay:
        return RoutingReplay(args)
    from megatron.core.transformer.moe.router import TopKRouter

    routers = [
        module
        for chunk in model
        for name, module in chunk.named_modules()
        if isinstance(module, TopKRouter) and ".mtp." not in f".{name}"
    ]
    found = torch.tensor([len(routers)], device=next(model[0].parameters()).device)
    dist.all_reduce(found)
    if not found.item():
        raise ValueError(
            "--use-routing-replay: the model has no megatron TopKRouter whose choice could be replayed; leave the flag "
            "out, or let the layers of --spec route with megatron.core.transformer.moe.router.TopKRouter"
        )
    return RoutingReplay(args, routers, from_engines=args.use_rollout_routing_replay)
