"""An estimate of the memory that a run needs on every GPU, from its flags alone.

``memory(args)`` gives the numbers, ``memory_text.memory_text(args)`` the table of ``--dry-run``. Formulas and
what is left out:  docs/en/advanced/memory.md.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.models.facts import known_config
from slime.planner.memory_engine import EngineMemory, engine_memory
from slime.planner.memory_trainer import TrainerMemory, trainer_memory
from slime.planner.model_size import ModelSize, model_size

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
class Memory:
    """What a run needs. ``trainer`` is the GPU of the pipeline stage that needs most, None without a trainer;
    ``engine`` a GPU of an engine, None without engines of our own. ``remarks`` are sentences.
    """

    size: ModelSize
    trainer: TrainerMemory | None
    engine: EngineMemory | None
    colocate: bool
    offload_train: bool
    offload_rollout: bool
    remarks: tuple[str, ...]

    def training(self, capacity: float) -> float:
        """Bytes that are in use on a GPU of ``capacity`` bytes at the peak of training or of a weight update."""
        if self.trainer is None:
            return 0.0
        if self.engine is None or not self.colocate:
            return float(self.trainer.total)
        return max(self.trainer.total + self._engine_beside(capacity), self._weight_update())

    def generating_fits(self, capacity: float) -> bool:
        """Whether an engine on a GPU of ``capacity`` bytes holds a request, beside what the trainer leaves behind."""
        if self.engine is None:
            return True
        if not self.engine.fits(capacity):
            return False
        return not self.colocate or self.engine.reserve(capacity) >= self.engine.context + self._trainer_beside()

    def fits(self, capacity: float) -> bool:
        """Whether both fit on GPUs of ``capacity`` bytes."""
        return self.training(capacity) <= capacity and self.generating_fits(capacity)

    def _engine_beside(self, capacity: float) -> float:
        """What an engine on the same GPU keeps while the trainer trains."""
        assert self.engine is not None
        if self.offload_rollout:
            return self.engine.context
        return capacity - self.engine.reserve(capacity) + self.engine.context

    def _trainer_beside(self) -> float:
        """What a trainer on the same GPU keeps while the engine generates."""
        if self.trainer is None:
            return 0.0
        return self.trainer.context if self.offload_train else self.trainer.static

    def _weight_update(self) -> float:
        """Both on the GPU: the trainer's parameters and buckets, and the engine's weights."""
        assert self.engine is not None
        assert self.trainer is not None
        return float(self.trainer.sending + self.engine.weights + self.engine.context)


def memory(args: Namespace) -> Memory:
    """Return the estimate for ``args`` (from ``parse_args``). Raises ValueError when they do not describe the model."""
    config = checkpoint_config(args)
    size = model_size(args, config)
    trains = not args.debug_rollout_only
    engine = engine_memory(args, size.shape, config) if _has_engines(args) else None
    return Memory(
        size=size,
        trainer=max(trainer_memory(args, size), key=lambda stage: stage.total) if trains else None,
        engine=engine,
        colocate=bool(args.colocate),
        offload_train=bool(args.offload_train),
        offload_rollout=bool(args.offload_rollout),
        remarks=tuple(_remarks(args, size, engine)),
    )


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


def _remarks(args: Namespace, size: ModelSize, engine: EngineMemory | None) -> list[str]:
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
    if engine is not None and not engine.format.known:
        found.append(f"quantization {engine.format.name}: its size is not known, weights are counted unquantized")
    if engine is not None and args.sglang_config:
        found.append("--sglang-config: counted is an engine of --rollout-num-gpus-per-engine GPUs")
    return found
