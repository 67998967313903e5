"""Which layers every pipeline rank holds, chunk by chunk."""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Parallel:
    """Sizes of the trainer's parallel groups. ``vpp`` counts the chunks of a pipeline rank."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1
    sequence: bool = False

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def dense_ranks(self) -> int:
        """Ranks that share the optimiser state of everything but experts: data x context parallel."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the optimiser state of the same experts."""
        # Without expert parallelism Megatron reduces expert gradients like all others.
        return self.dense_ranks if self.ep == 1 else max(1, self.ranks // (self.etp * self.ep * self.pp))

    @property
    def sp(self) -> int:
        """Ranks that share the sequence between the tensor-parallel regions."""
        return self.tp if self.sequence else 1


@dataclass(frozen=True)
class Chunk:
    """A run of decoder layers on one pipeline rank; ``mtp`` counts layers of multi-token prediction."""

    layers: range
    embedding: bool = False
    output: bool = False
    mtp: int = 0


def parallel_of(args: Namespace) -> Parallel:
    """Return the parallel sizes that ``args`` ask for."""
    tp, pp = _size(args, "tensor_model_parallel_size"), _size(args, "pipeline_model_parallel_size")
    cp = _size(args, "context_parallel_size")
    ranks = int(args.actor_num_nodes) * int(args.actor_num_gpus_per_node)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    vpp = _size(args, "virtual_pipeline_model_parallel_size")
    return Parallel(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=max(1, ranks // (tp * pp * cp)),
        ep=_size(args, "expert_model_parallel_size"),
        etp=getattr(args, "expert_tensor_parallel_size", None) or tp,
        vpp=len(_layout_stages(layout)) // pp if layout else vpp,
        sequence=bool(getattr(args, "sequence_parallel", False)) and tp > 1,
    )


def pipeline_chunks(args: Namespace, layers: int, mtp: int, parallel: Parallel) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every pipeline rank: ``[pp][vpp]``.

    As Megatron: layers run through the ranks chunk after chunk; the first and the last rank may have a number of
    layers of their own, embedding and loss may count as a layer each, and a layout string (``Et*3|(tt|)*29,m|L``)
    says it all. Raises ValueError when the layers do not come out even.
    """
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout:
        items = _layout_stages(layout)
    else:
        counts = _layers_per_rank(args, layers, parallel.pp)
        items = _even_stages(args, counts, parallel.vpp, mtp)
    if sum(item.count("t") for item in items) != layers or len(items) != parallel.pp * parallel.vpp:
        raise ValueError(
            f"{layers} layers cannot be spread over {parallel.pp} pipeline stages x {parallel.vpp} chunks like this"
        )
    chunks, start = [], 0
    for item in items:  # virtual stage 0 of all ranks, virtual stage 1 of all ranks, ...
        stop = start + item.count("t")
        chunks.append(Chunk(range(start, stop), "E" in item, "L" in item, item.count("m")))
        start = stop
    return tuple(tuple(chunks[rank :: parallel.pp]) for rank in range(parallel.pp))


def _size(args: Namespace, name: str) -> int:
    return int(getattr(args, name, None) or 1)


def _layers_per_rank(args: Namespace, layers: int, pp: int) -> list[int]:
    """Return the layers of each pipeline rank, where embedding and loss may stand for one."""
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    last = getattr(args, "decoder_last_pipeline_num_layers", None)
    if pp == 1 or (first is None and last is None):
        counted = layers + _flag(args, "account_for_embedding_in_pipeline_split")
        counted += _flag(args, "account_for_loss_in_pipeline_split")
        return [counted // pp] * pp
    middle = pp - (first is not None) - (last is not None)
    each = (layers - (first or 0) - (last or 0)) // middle if middle else 0
    counts = [each] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _even_stages(args: Namespace, counts: list[int], vpp: int, mtp: int) -> list[str]:
    """Return the chunks in the order of the layers, in the letters of a layout string."""
    stages = ["t" * (count // vpp) for _ in range(vpp) for count in counts]
    if _flag(args, "account_for_embedding_in_pipeline_split"):
        stages[0] = stages[0][1:]
    if _flag(args, "account_for_loss_in_pipeline_split"):
        stages[-1] = stages[-1][1:]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    return stages


def _flag(args: Namespace, name: str) -> int:
    return int(bool(getattr(args, name, False)))


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def _layout_stages(layout: Any) -> list[str]:
    """Return the stages of a layout as strings of letters; lists of names are taken too."""
    if not isinstance(layout, str):
        return ["".join(_LETTERS.get(str(name), str(name)) for name in stage) for stage in layout]
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")
