"""Models that load checkpoints as SGLang's do: fused layers, shards, experts, padded and tied embeddings."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

WIDTH, INNER, EXPERTS, VOCABULARY = 12, 10, 4, 21
"""Sizes of the models; a rank of two holds 11 rows of the embedding, of which the second rank's last is padding."""

DENSE = {
    "embed.weight": (VOCABULARY, WIDTH),
    "norm.weight": (WIDTH,),
    **{f"attn.{part}_proj.weight": (rows, WIDTH) for part, rows in (("q", 16), ("k", 4), ("v", 4))},
    "attn.o_proj.weight": (WIDTH, 16),
    **{f"mlp.{part}_proj.weight": (INNER, WIDTH) for part in ("gate", "up")},
    "mlp.down_proj.weight": (WIDTH, INNER),
}
MOE = {
    **{name: shape for name, shape in DENSE.items() if not name.startswith("mlp")},
    "lm_head.weight": (VOCABULARY, WIDTH),
    **{f"experts.{i}.{part}_proj.weight": (INNER, WIDTH) for i in range(EXPERTS) for part in ("gate", "up")},
    **{f"experts.{i}.down_proj.weight": (WIDTH, INNER) for i in range(EXPERTS)},
    "experts.bias": (EXPERTS,),
}


class Dense(nn.Module):
    """Rank ``rank`` of ``ranks``; its output layer is the embedding. The one head of keys is on every rank."""

    def __init__(self, rank: int, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.rank, self.ranks, self.dtype = rank, ranks, dtype
        self.rows = -(-VOCABULARY // ranks)
        self.add("embed", self.rows, WIDTH)
        self.lm_head = self.embed
        self.add("norm", WIDTH)
        self.add("qkv", 16 // ranks + 8, WIDTH)
        self.add("o", WIDTH, 16 // ranks)
        self.add_mlp()

    def add(self, name: str, *shape: int) -> None:
        numbers = torch.zeros(shape, dtype=self.dtype)
        self.register_parameter(name, nn.Parameter(numbers, requires_grad=False))

    def add_mlp(self) -> None:
        self.add("gate_up", 2 * INNER // self.ranks, WIDTH)
        self.add("down", WIDTH, INNER // self.ranks)

    def shard(self, loaded: torch.Tensor, dim: int) -> torch.Tensor:
        size = loaded.shape[dim] // self.ranks
        return loaded.narrow(dim, self.rank * size, size)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, loaded in weights:
            self.load(name, loaded)

    def load(self, name: str, loaded: torch.Tensor) -> None:
        if name in ("embed.weight", "lm_head.weight"):
            table = getattr(self, name.removesuffix(".weight"))
            part = loaded[self.rank * self.rows : (self.rank + 1) * self.rows]
            table[: len(part)].data.copy_(part)
            table[len(part) :].data.fill_(0)
        elif name == "norm.weight":
            self.norm.data.copy_(loaded)
        elif name == "attn.o_proj.weight":
            self.o.data.copy_(self.shard(loaded, 1))
        elif name == "attn.q_proj.weight":
            self.qkv.data.narrow(0, 0, 16 // self.ranks).copy_(self.shard(loaded, 0))
        elif name in ("attn.k_proj.weight", "attn.v_proj.weight"):
            self.qkv.data[16 // self.ranks :].chunk(2)["kv".index(name[5])].copy_(loaded.to(self.qkv.device))
        elif name == "mlp.down_proj.weight":
            self.down.data.copy_(self.shard(loaded, 1))
        elif name.startswith("mlp."):
            self.gate_up.data.chunk(2)["up" in name].copy_(self.shard(loaded, 0))


class Experts(Dense):
    """With experts, the down projections of which are kept transposed, and an output layer of its own.

    ``whole``: each rank holds half of the experts, not half of every one.
    """

    whole = False

    def add_mlp(self) -> None:
        del self.lm_head
        self.add("lm_head", self.rows, WIDTH)
        self.count = EXPERTS // self.ranks if self.whole else EXPERTS
        inner = INNER if self.whole else INNER // self.ranks
        self.add("w13", self.count, 2 * inner, WIDTH)
        self.add("w2", self.count, inner, WIDTH)
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=self.dtype))

    def load(self, name: str, loaded: torch.Tensor) -> None:
        if name == "experts.bias":
            self.bias[:] = loaded
        elif not name.startswith("experts."):
            super().load(name, loaded)
        else:
            expert = int(name.split(".")[1]) - (self.rank * self.count if self.whole else 0)
            if not 0 <= expert < self.count:
                return
            if "down" in name:
                self.w2.data[expert].t().copy_(loaded if self.whole else self.shard(loaded, 1))
            else:
                half = self.w13.data[expert].chunk(2)["up" in name]
                half.copy_(loaded if self.whole else self.shard(loaded, 0))


class WholeExperts(Experts):
    """Expert parallelism."""

    whole = True


KINDS = {"dense, tied": (Dense, DENSE), "experts": (Experts, MOE), "expert parallelism": (WholeExperts, MOE)}
"""The kind that a rank is made as, and the shapes of its checkpoint."""


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a checkpoint."""
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make).to(dtype) for name, shape in shapes.items()}


def described(weights: dict[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the name, shape and dtype of each."""
    return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in weights.items()]


def contents(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers."""
    return {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
