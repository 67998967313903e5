"""An estimate of the memory that a run needs on every GPU, from its flags alone.

``memory(args)`` gives the numbers, ``memory_text(args)`` the table of ``--dry-run``. Formulas and what is left out:
docs/en/advanced/memory.md.
"""

from __future__ import annotations

import json
import textwrap
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.arguments.command_line import all_flags, build_parser, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.models.facts import known_config
from slime.arguments.models.megatron_flags import describe
from slime.arguments.placement import args_of_group, layout_of, models_of
from slime.arguments.rules.checkpoints import needs_reference
from slime.planner.memory_engine import EngineMemory, engine_memory
from slime.planner.memory_trainer import (
    TrainerMemory,
    element_size,
    gradient_size,
    memory_by_part,
    overwrites_logits,
    state_bytes,
    trainer_memory,
)
from slime.planner.model_size import ModelSize, model_size
from slime.utils.model_shape import ModelShape, shape_of

GIB = 2**30

# GiB that CUDA (ROCm) gives to programs on GPUs sold with so many GB; of several GPUs the smallest.
_USABLE = {
    24: 22.0,  # L4, A10; RTX 4090: 23.6
    40: 39.4,  # A100
    48: 44.3,  # A40, L40S; RTX A6000: 47.5
    80: 79.1,  # A100, H100
    96: 95.0,  # H20
    141: 139.7,  # H200
    192: 178.3,  # B200; MI300X: 192.0
}
CAPACITIES: dict[int, int] = {gigabytes: int(usable * GIB) for gigabytes, usable in _USABLE.items()}


@dataclass(frozen=True)
class EnginesMemory:
    """A GPU of an engine of a group. ``label`` names model and group, and is empty where flags describe all engines.
    ``shares``: the GPU is one of the trainer's. ``update_weights``: the trainer sends it weights.
    """

    engine: EngineMemory
    label: str = ""
    shares: bool = False
    update_weights: bool = True


@dataclass(frozen=True)
class Memory:
    """What a run needs. ``trainer`` is the GPU of the pipeline stage that needs most, None without a trainer;
    ``engines`` a GPU of an engine of every group, empty without engines of our own. ``remarks`` are sentences.
    """

    size: ModelSize
    trainer: TrainerMemory | None
    engines: tuple[EnginesMemory, ...]
    offload_train: bool
    offload_rollout: bool
    remarks: tuple[str, ...]

    @property
    def engine(self) -> EngineMemory | None:
        """A GPU of an engine of the first group."""
        return self.engines[0].engine if self.engines else None

    @property
    def colocate(self) -> bool:
        """Whether some engine is on the trainer's GPUs."""
        return any(group.shares for group in self.engines)

    def training(self, capacity: float) -> float:
        """Bytes that are in use on a GPU of ``capacity`` bytes at the peak of training or of a weight update."""
        if self.trainer is None:
            return 0.0
        beside = [self.trainer.total + self._engine_beside(g.engine, capacity) for g in self.engines if g.shares]
        updates = [
            self.trainer.sending + g.engine.weights + g.engine.context
            for g in self.engines
            if g.shares and g.update_weights
        ]
        return float(max([self.trainer.total, *beside, *updates]))

    def generating_fits(self, group: EnginesMemory, capacity: float) -> bool:
        """Whether an engine on a GPU of ``capacity`` bytes holds a request, beside what the trainer leaves behind."""
        if not group.engine.fits(capacity):
            return False
        return not group.shares or group.engine.reserve(capacity) >= group.engine.context + self._trainer_beside()

    def fits(self, capacity: float) -> bool:
        """Whether everything fits on GPUs of ``capacity`` bytes."""
        return self.training(capacity) <= capacity and all(self.generating_fits(g, capacity) for g in self.engines)

    def _engine_beside(self, engine: EngineMemory, capacity: float) -> float:
        """What an engine on the same GPU keeps while the trainer trains."""
        if self.offload_rollout:
            return engine.context
        return capacity - engine.reserve(capacity) + engine.context

    def _trainer_beside(self) -> float:
        """What a trainer on the same GPU keeps while the engine generates."""
        if self.trainer is None:
            return 0.0
        return self.trainer.context if self.offload_train else self.trainer.static


def memory(args: Namespace) -> Memory:
    """Return the estimate for ``args`` (from ``parse_args``). Raises ValueError when they do not describe the model."""
    config = checkpoint_config(args)
    size = model_size(args, config)
    trains = not args.debug_rollout_only
    unknown: list[str] = []
    engines: list[EnginesMemory] = []
    if _has_engines(args) and args.sglang_config is None:
        engines = [EnginesMemory(engine_memory(args, size.shape, config), shares=bool(args.colocate))]
    elif _has_engines(args):
        engines = list(_of_groups(args, size.shape, unknown))
    return Memory(
        size=size,
        trainer=max(trainer_memory(args, size), key=lambda stage: stage.total) if trains else None,
        engines=tuple(dict.fromkeys(engines)),
        offload_train=bool(args.offload_train),
        offload_rollout=bool(args.offload_rollout),
        remarks=(*_remarks(args, size, engines), *unknown),
    )


def _of_groups(args: Namespace, shape: ModelShape, unknown: list[str]) -> Iterator[EnginesMemory]:
    """The groups of ``--sglang-config``; of a frozen model its own checkpoint counts, and one that is not there is a
    sentence in ``unknown``."""
    layout = layout_of(args)
    first = layout.rollout_offset
    for model in models_of(args) or ():
        config = checkpoint_config(Namespace(hf_checkpoint=model.model_path))
        own: ModelShape | None = shape
        if not model.update_weights:
            try:
                own = _shape_of_checkpoint(config)
            except (ArgumentError, ValueError) as error:
                own = None
                unknown.append(f"the memory of model {model.name} ({model.model_path}) is not counted: {error}")
        generating = [group for group in model.server_groups if group.worker_type != "placeholder"]
        for group in model.server_groups:
            shares, first = bool(args.colocate) and first < layout.trainer_slots, first + group.num_gpus
            if own is None or group not in generating:
                continue
            engine = engine_memory(args_of_group(args, group), own, config)
            if not model.update_weights:
                engine = replace(engine, request_tokens=None)  # what it is asked is up to the one who asks
            number = f", group {generating.index(group) + 1}" if len(generating) > 1 else ""
            yield EnginesMemory(engine, f"model {model.name}{number}", shares, bool(model.update_weights))


def _shape_of_checkpoint(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model of which there are no flags. Raises ValueError where there is no ``config``."""
    if not config:
        raise ValueError("there is no config.json")
    values, _ = read_words(build_parser(all_flags()), describe(dict(config)).words())
    return shape_of(Namespace(**values), config)


def checkpoint_config(args: Namespace) -> Mapping[str, Any]:
    """Return the ``config.json`` of ``--hf-checkpoint``; where that is not there, of the published model of its name.

    Empty when there is neither.
    """
    checkpoint = args.hf_checkpoint
    if not checkpoint:
        return {}
    try:
        found = json.loads((Path(checkpoint) / "config.json").read_text())
        return found if isinstance(found, dict) else {}
    except (OSError, json.JSONDecodeError):
        return known_config(checkpoint) or {}


def _has_engines(args: Namespace) -> bool:
    if args.debug_train_only or args.rollout_external:
        return False
    return bool(args.rollout_num_gpus)


def _remarks(args: Namespace, size: ModelSize, engines: Sequence[EnginesMemory]) -> list[str]:
    found = list(size.shape.remarks)
    given = [name for name in ("only_train_params_name_list", "freeze_params_name_list") if getattr(args, name, None)]
    if given:
        found.append(f"frozen parameters are counted as trained: --{given[0].replace('_', '-')}")
    if args.custom_model_provider_path:
        found.append("--custom-model-provider-path builds the model; counted is what the model flags describe")
    if args.use_critic:
        found.append("the critic takes turns with the actor and needs about as much")
    if args.fp8 or args.fp4:
        found.append("training in fp8 or fp4 is counted as 16 bits")
    if size.shape.experts is not None:
        found.append("experts are counted with an even load; the busiest rank may get more tokens")
    if args.balance_by_flops:
        found.append("--balance-by-flops may exceed the tokens of a micro-batch")
    for name in dict.fromkeys(group.engine.format.name for group in engines if not group.engine.format.known):
        found.append(f"quantization {name}: its size is not known, weights are counted unquantized")
    return found


WIDTH = 98  # and two for the indent
TIGHT = 0.9  # beyond this part of a GPU, fragmentation decides


def memory_text(args: Namespace) -> str:
    """Return the table, indented by two columns, at most 100 columns wide, or a sentence without a model."""
    try:
        found = memory(args)
    except ValueError as error:
        return f"  No estimate: {error}."
    lines = ["Per GPU, in GiB, on CUDA GPUs; what is counted and what is not: docs/en/advanced/memory.md"]
    parts = ", ".join(
        f"{name} {_billions(count)}" for name, count in found.size.parts.items() if count and name != "norms"
    )
    active = f", {_billions(found.size.active)} per token" if found.size.shape.experts else ""
    model = f"model      {_billions(found.size.total)} parameters{active}: {parts}"
    lines += textwrap.wrap(model, WIDTH, subsequent_indent=" " * 11)  # a no-break space sticks
    if found.trainer is not None:
        lines += _trainer_lines(args, found.size, found.trainer)
    for group in found.engines:
        lines += _engine_lines(group)
    if found.colocate and found.trainer is not None:
        lines += [_colocated_line(found)]
    lines += ["", *_verdict_lines(found)]
    for remark in found.remarks:
        lines += textwrap.wrap(f"note: {remark}", WIDTH, subsequent_indent="      ")
    return "\n".join(f"  {line}".rstrip() for line in lines).replace("\xa0", " ")


def _trainer_lines(args: Namespace, size: ModelSize, trainer: TrainerMemory) -> list[str]:
    parallel, rank = size.parallel, size.ranks[trainer.stage]
    sizes = f"tensor {parallel.tp}, pipeline {parallel.pp}, context {parallel.cp}, data {parallel.dp}"
    if size.shape.experts:
        sizes += f", expert {parallel.ep} x {parallel.etp}"
    stage = f"; stage {trainer.stage + 1} needs most" if parallel.pp > 1 else ""
    shared = f"shared by {parallel.dense_ranks} ranks" if parallel.dense_ranks > 1 else "not shared"
    if rank.expert:
        shared += f", of experts by {parallel.expert_ranks}" if parallel.expert_ranks > 1 else ", of experts not"
    if not trainer.optimizer:
        shared = "in the host's memory"
    width = {2: "fp16" if args.fp16 else "bf16", 4: "fp32"}[element_size(args)]
    logits_in = width if overwrites_logits(args) else "fp32"
    recompute = args.recompute_granularity or "no"
    of_adapters = " of the adapters" if args.lora_rank else ""
    held = f", {trainer.in_flight:g} micro-batches" if trainer.in_flight > 1 else ""
    explained = {
        "parameters": f"{_billions(rank.total)} in {width}" + (" and adapters" if args.lora_rank else ""),
        "gradients": ("fp32" if gradient_size(args) == 4 else width) + of_adapters,
        "optimizer": f"{state_bytes(args):g} bytes per parameter{of_adapters}, {shared}",
        "activations": f"{trainer.tokens:,} tokens{held}, {recompute} recomputation",
        "logits": f"{trainer.tokens:,} x {size.shape.vocab // parallel.tp:,} in {logits_in}, with their gradient",
        "one layer's backward": "gradients of activations" + (", recomputed ones" if recompute == "full" else ""),
        "CUDA and NCCL": "a constant: context, kernels, communication buffers",
    }
    lines = [f"trainer    {sizes}{stage}"]
    lines += [_row(name, count, explained[name]) for name, count in memory_by_part(trainer).items()]
    what = "peak of a step" if trainer.step == trainer.total else "peak while weights are sent"
    lines.append(_row("total", trainer.total, what))
    if trainer.host:
        lines.append(_row("in host memory", trainer.host, _host_copies(args, trainer)))
    return lines


def _host_copies(args: Namespace, trainer: TrainerMemory) -> str:
    """Say what of this GPU is kept in the host's memory."""
    what = []
    if trainer.offloaded:
        what.append("the offloaded trainer")
    if needs_reference(args) and not args.lora_rank:
        what.append("actor and reference")
    if args.optimizer_cpu_offload:
        what.append("optimizer state")
    return "on top: " + ", ".join(what)


def _engine_lines(group: EnginesMemory) -> list[str]:
    engine = group.engine
    sizes = f"tensor {engine.sizes.tp}" + (f", pipeline {engine.sizes.pp}" if engine.sizes.pp > 1 else "")
    sizes += f", data-parallel attention {engine.sizes.dp}" if engine.sizes.dp > 1 else ""
    gpus = "1 GPU" if engine.sizes.gpus == 1 else f"{engine.sizes.gpus} GPUs"
    label = f"{group.label}, " if group.label else ""
    lines = [f"engine     {label}{gpus}: {sizes}", _row("weights", engine.weights, engine.format.name)]
    per_token = f"{engine.kv_per_token / 1024:,.1f} KiB per token"
    state = f", {engine.state_per_request / 2**20:,.1f} MiB of state" if engine.state_per_request else ""
    if engine.request_tokens:
        cache = engine.request_tokens * engine.kv_per_token + engine.state_per_request
        lines.append(_row("one request", cache, f"{engine.request_tokens:,} tokens, {per_token}{state}"))
    else:
        lines.append(_row("one request", engine.state_per_request, per_token + state))
    return lines


def _colocated_line(found: Memory) -> str:
    offloaded = {"trainer": found.offload_train, "engine": found.offload_rollout}
    resident = [name for name, is_offloaded in offloaded.items() if not is_offloaded]
    if resident:
        return f"colocated  both on every GPU; what is not offloaded stays there: {', '.join(resident)}"
    return "colocated  they take turns; the offloaded one keeps its CUDA and NCCL buffers"


def _verdict_lines(found: Memory) -> list[str]:
    """A table of GPUs; one more for every group of engines after the first."""
    lines: list[str] = []
    groups: Sequence[EnginesMemory | None] = found.engines or (None,)
    for number, group in enumerate(groups):
        head, training = ["GPU"], found.trainer is not None and number == 0
        head += ["training"] if training else []
        head += [f"generating ({group.label or 'per engine'})"] if group is not None else []
        rows = []
        for gigabytes, capacity in CAPACITIES.items():
            row = [f"{gigabytes} GB"]
            row += [_training(found.training(capacity), capacity)] if training else []
            row += [_generating(found, group, capacity)] if group is not None else []
            rows.append(row)
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines += [""] if lines else []
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [head, *rows]]
    return lines


def _training(used: float, capacity: int) -> str:
    if used > capacity:
        return f"does not fit: {(used - capacity) / GIB:,.1f} over"
    if used > TIGHT * capacity:
        return f"tight: {(capacity - used) / GIB:,.1f} free"
    return f"fits: {(capacity - used) / GIB:,.1f} free"


def _generating(found: Memory, group: EnginesMemory, capacity: int) -> str:
    engine = group.engine
    cache = engine.cache_bytes(capacity)
    if cache <= 0:
        return f"does not fit: weights {-cache / GIB:,.1f} over"
    requests = engine.requests(capacity)
    if not engine.fits(capacity):
        return f"does not fit: {cache / GIB:,.1f} of cache hold no request"
    if not found.generating_fits(group, capacity):
        return "does not fit beside the trainer"
    room = f"{cache / GIB:,.1f} of cache: {engine.tokens(capacity):,} tokens"
    return room if requests is None else f"{room}, {requests:,} of these requests"


def _row(name: str, count: float, explained: str) -> str:
    return f"  {name:<21}{count / GIB:>7.1f}  {explained}"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f}\xa0B" if count >= 5e6 else f"{count / 1e6:,.2f}\xa0M"
