"""Which flags would lower the memory of a run, with what each would leave."""

from __future__ import annotations

import copy
import math
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.arguments.plan.memory_trainer import longest_sample

WORTH = 0.99  # advice must leave at most this part of what is needed now


@dataclass(frozen=True)
class Advice:
    """Flags to give instead of what is given, the bytes that a GPU would need with them, and their attributes."""

    flags: str
    needed: float
    values: Mapping[str, Any] = field(default_factory=dict)


def trainer_advice(args: Namespace, capacity: float) -> list[Advice]:
    """Return changes that lower the peak of training on a GPU of ``capacity`` bytes, the most effective first."""
    return _ranked(args, _trainer_changes(args), lambda changed: _training(changed, capacity))


def trainer_together(args: Namespace, advice: Sequence[Advice], capacity: float) -> float | None:
    """Return what a GPU would need with all of ``advice``; None where they cannot all be given."""
    changed = _with(args, {name: value for item in advice for name, value in item.values.items()})
    parallel = (changed.tensor_model_parallel_size, changed.pipeline_model_parallel_size, changed.context_parallel_size)
    if _ranks(changed) % math.prod(int(size or 1) for size in parallel):
        return None
    try:
        return _training(changed, capacity)
    except ValueError:
        return None


def engine_advice(args: Namespace) -> list[Advice]:
    """Return changes that lower what weights and one request of the greatest length need on a GPU of an engine."""
    return _ranked(args, _engine_changes(args), _generating)


def _training(args: Namespace, capacity: float) -> float:
    from slime.arguments.plan.memory import memory

    return memory(args).training(capacity)


def _generating(args: Namespace) -> float:
    from slime.arguments.plan.memory import memory

    engine = memory(args).engine
    assert engine is not None
    request = (engine.request_tokens or 1) * engine.kv_per_token + engine.state_per_request
    return engine.weights + request + engine.context


def _with(args: Namespace, values: Mapping[str, Any]) -> Namespace:
    changed = copy.copy(args)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed


def _ranks(args: Namespace) -> int:
    return int(args.actor_num_nodes) * int(args.actor_num_gpus_per_node)


def _ranked(
    args: Namespace, changes: Iterator[tuple[str, dict[str, Any]]], needed: Callable[[Namespace], float]
) -> list[Advice]:
    now, found = needed(args), []
    for flags, values in changes:
        try:
            found.append(Advice(flags, needed(_with(args, values)), values))
        except ValueError:  # the layers or sizes do not divide
            continue
    return sorted((item for item in found if item.needed <= WORTH * now), key=lambda item: item.needed)


def _trainer_changes(args: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (flags, attributes): one change each that the flags' rules would accept."""
    ranks = _ranks(args)
    tp, pp = int(args.tensor_model_parallel_size or 1), int(args.pipeline_model_parallel_size or 1)
    cp = int(args.context_parallel_size or 1)
    if ranks % (2 * tp * pp * cp) == 0:
        if _heads_divide(args, 2 * tp) and 2 * tp <= int(getattr(args, "num_gpus_per_node", None) or 8):
            also = "" if getattr(args, "sequence_parallel", False) else " --sequence-parallel"
            yield f"--tensor-model-parallel-size {2 * tp}{also}", _doubled_tp(args, tp)
        if _even_pipeline(args) and int(args.num_layers) % (2 * pp) == 0:
            yield f"--pipeline-model-parallel-size {2 * pp}", {"pipeline_model_parallel_size": 2 * pp}
        yield f"--context-parallel-size {2 * cp}", {"context_parallel_size": 2 * cp}
    yield from _expert_change(args, ranks, tp, pp)
    if tp > 1 and not getattr(args, "sequence_parallel", False):
        yield "--sequence-parallel", {"sequence_parallel": True}
    if getattr(args, "recompute_granularity", None) != "full":
        words = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        values = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        yield words, values
    yield from _token_change(args, cp)
    if not getattr(args, "optimizer_cpu_offload", False):
        words = "--optimizer-cpu-offload --optimizer-offload-fraction 1"
        yield words, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
    nodes = 2 * int(args.actor_num_nodes)
    yield f"--actor-num-nodes {nodes}", {"actor_num_nodes": nodes}


def _expert_change(args: Namespace, ranks: int, tp: int, pp: int) -> Iterator[tuple[str, dict[str, Any]]]:
    experts = getattr(args, "num_experts", None)
    if not experts:
        return
    ep = 2 * int(getattr(args, "expert_model_parallel_size", None) or 1)
    etp = int(getattr(args, "expert_tensor_parallel_size", None) or tp)
    if experts % ep == 0 and ranks % (ep * etp * pp) == 0:
        yield f"--expert-model-parallel-size {ep}", {"expert_model_parallel_size": ep}


def _token_change(args: Namespace, cp: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Half the tokens of a micro-batch, as long as the longest sample fits in."""
    tokens = getattr(args, "max_tokens_per_gpu", None)
    if not getattr(args, "use_dynamic_batch_size", False) or not tokens:
        return
    half = max(int(tokens) // 2, -(-(longest_sample(args) or 0) // cp))
    if half < int(tokens):
        yield f"--max-tokens-per-gpu {half}", {"max_tokens_per_gpu": half}


def _heads_divide(args: Namespace, tp: int) -> bool:
    grouped = getattr(args, "group_query_attention", False)
    groups = int(args.num_query_groups) if grouped else int(args.num_attention_heads)
    return int(args.num_attention_heads) % tp == 0 and (groups % tp == 0 or tp % groups == 0)


def _even_pipeline(args: Namespace) -> bool:
    uneven = (
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
        "virtual_pipeline_model_parallel_size",
    )
    return all(getattr(args, name, None) is None for name in uneven)


def _doubled_tp(args: Namespace, tp: int) -> dict[str, Any]:
    values: dict[str, Any] = {"tensor_model_parallel_size": 2 * tp, "sequence_parallel": True}
    if getattr(args, "vocab_size", None) and "padded_vocab_size" not in getattr(args, "explicit_flags", ()):
        values["padded_vocab_size"] = None  # it follows from the size
    return values


def _engine_changes(args: Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    gpus = 2 * int(args.rollout_num_gpus_per_engine)
    groups = int(getattr(args, "sglang_pp_size", None) or 1) * int(getattr(args, "sglang_dp_size", None) or 1)
    if int(args.rollout_num_gpus or 0) % gpus == 0 and gpus % groups == 0 and _heads_divide(args, gpus // groups):
        yield f"--rollout-num-gpus-per-engine {gpus}", {"rollout_num_gpus_per_engine": gpus}
    if not getattr(args, "sglang_quantization", None):
        yield "--sglang-quantization fp8", {"sglang_quantization": "fp8"}
    if (getattr(args, "sglang_kv_cache_dtype", None) or "auto") == "auto":
        yield "--sglang-kv-cache-dtype fp8_e4m3", {"sglang_kv_cache_dtype": "fp8_e4m3"}
