"""Where this rank stands in the trainer's parallel layout, as far as sending weights needs it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrainerLayout:
    """``is_source``: the one rank of its pipeline stage that sends (data, context and tensor rank 0)."""

    rank: int
    world_size: int
    pp_rank: int
    pp_size: int
    is_source: bool

    @classmethod
    def current(cls) -> TrainerLayout:
        """Read the layout from the initialized megatron parallel state."""
        import torch.distributed as dist

        from slime.backends.megatron_utils import import_megatron

        import_megatron()
        from megatron.core import parallel_state as mpu

        return cls(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            pp_size=mpu.get_pipeline_model_parallel_world_size(),
            is_source=mpu.get_tensor_model_parallel_rank() == 0
            and mpu.get_data_parallel_rank(with_context_parallel=True) == 0,
        )
