"""NVIDIA GPUs through torch.cuda."""

from __future__ import annotations

from typing import Any

from slime.utils.accelerator.base import Accelerator


class CudaAccelerator(Accelerator):
    """Tensors live on the current CUDA device, ranks talk over NCCL."""

    device_type = "cuda"
    communication_backend = "nccl"

    def is_available(self) -> bool:
        import torch

        return torch.cuda.is_available()

    def current_device(self) -> Any:
        import torch

        return torch.device("cuda", torch.cuda.current_device())

    def set_device(self, index: int) -> None:
        """Raise ValueError, with the number of visible devices, when there is no device ``index``."""
        import torch

        count = torch.cuda.device_count()
        if not 0 <= index < count:
            raise ValueError(
                f"device {index} does not exist: this process sees {count} CUDA device(s). "
                "Check LOCAL_RANK and CUDA_VISIBLE_DEVICES."
            )
        torch.cuda.set_device(index)

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def empty_cache(self) -> None:
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()

    def memory_stats(self) -> dict[str, int]:
        import torch

        free, total = torch.cuda.mem_get_info()
        return {
            "total": total,
            "free": free,
            "used": total - free,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }
