"""An estimate of the memory that a run needs on every GPU, from its flags alone: ``memory(args)``.

Formulas and what is left out: docs/en/advanced/memory.md. ``memory_text`` writes the table of ``--dry-run``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime.arguments.args import Args
from slime.arguments.command_line import all_flags, build_parser, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import args_of_group, layout_of, models_of
from slime.arguments.rules import model_defaults
from slime.models import hf_fields
from slime.models.facts import known_config
from slime.models.megatron_flags import describe
from slime.models.shape import ModelShape, shape_of
from slime.preflight.plan.memory_engine import EngineMemory, engine_memory
from slime.preflight.plan.memory_trainer import TrainerMemory, image_tokens, micro_batch_tokens, trainer_memory
from slime.preflight.plan.model_size import ModelSize, model_size

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
CAPACITIES: dict[float, int] = {gigabytes: int(usable * GIB) for gigabytes, usable in _USABLE.items()}
_LEAST_USABLE = min(usable / gigabytes for gigabytes, usable in _USABLE.items())


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
    """The memory of a run. ``trainer`` is the GPU of the pipeline stage that needs most, None without a trainer;
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
        """True if some engine is on the trainer's GPUs."""
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
        """True if an engine on a GPU of ``capacity`` bytes holds a request, beside what the trainer leaves behind."""
        if not group.engine.fits(capacity):
            return False
        return not group.shares or group.engine.reserve(capacity) >= group.engine.context + self._trainer_beside()

    def fits(self, capacity: float) -> bool:
        """Return True if everything fits on GPUs of ``capacity`` bytes."""
        return self.training(capacity) <= capacity and all(self.generating_fits(g, capacity) for g in self.engines)

    def _engine_beside(self, engine: EngineMemory, capacity: float) -> float:
        """Return the bytes that an engine on the same GPU keeps while the trainer trains."""
        if self.offload_rollout:
            return engine.context
        return capacity - engine.reserve(capacity) + engine.context

    def _trainer_beside(self) -> float:
        """Return the bytes that a trainer on the same GPU keeps while the engine generates."""
        if self.trainer is None:
            return 0.0
        return self.trainer.context if self.offload_train else self.trainer.static


def capacities(gigabytes: float | None) -> dict[float, int]:
    """Return bytes by GB as sold: of ``--gpu-memory-gb`` where it is given, else of the GPUs of the table."""
    if gigabytes is None:
        return CAPACITIES
    return {gigabytes: CAPACITIES.get(gigabytes, int(gigabytes * _LEAST_USABLE * GIB))}


def memory(args: Args) -> Memory:
    """Return the estimate for ``args`` (from ``parse_args``). Raises ValueError when they do not describe the model."""
    config = checkpoint_config(args)
    if args.debug_rollout_only and args.num_layers is None and config:  # without a trainer nothing asks for model flags
        args = copy.copy(args)
        model_defaults.fill(args, hf_fields.text_part(dict(config)), args.explicit_flags)
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


def _of_groups(args: Args, shape: ModelShape, unknown: list[str]) -> Iterator[EnginesMemory]:
    """The groups of ``--sglang-config``; of a frozen model its own checkpoint counts, and one that is not there is a
    sentence in ``unknown``."""
    layout = layout_of(args)
    first = layout.rollout_offset
    for model in models_of(args) or ():
        config = checkpoint_config(Args(hf_checkpoint=model.model_path))
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
    return shape_of(Args(**values), config)


def checkpoint_config(args: Args) -> Mapping[str, Any]:
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


def _has_engines(args: Args) -> bool:
    if args.debug_train_only or args.rollout_external:
        return False
    return bool(args.rollout_num_gpus)


def _remarks(args: Args, size: ModelSize, engines: Sequence[EnginesMemory]) -> list[str]:
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
    if size.shape.tower is not None and not args.debug_rollout_only and args.num_rollout != 0:
        tokens = micro_batch_tokens(args, size.parallel) * size.parallel.cp
        images = image_tokens(args, tokens)
        how = (
            "by the lengths of prompts and samples" if images < tokens else "--rollout-max-prompt-len would limit them"
        )
        found.append(f"{images:,} of the {tokens:,} tokens of a micro-batch are counted as those of images ({how})")
    if args.balance_by_flops:
        found.append("--balance-by-flops may exceed the tokens of a micro-batch")
    for name in dict.fromkeys(group.engine.format.name for group in engines if not group.engine.format.known):
        found.append(f"quantization {name}: its size is not known, weights are counted unquantized")
    return found
