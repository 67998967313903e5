"""RMSNorm that needs neither TransformerEngine nor apex. Import after ``import_megatron()``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from slime.utils import accelerator


class TorchRMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension: ``x / sqrt(mean(x^2) + eps) * weight``.

    Unlike megatron's torch norm it works under sequence parallelism. With ``layernorm_zero_centered_gamma`` the
    factor is ``1 + weight``. Raises ValueError for any other normalisation (there the message says what to do).
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"--normalization {config.normalization} needs TransformerEngine or apex, and neither is installed; "
                "without them only RMSNorm is available."
            )
        self.zero_centered = config.layernorm_zero_centered_gamma
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        fill = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
        # Megatron sums the gradients of weights so marked over the tensor-parallel ranks, of which each normalises
        # only its part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps
        self.shape = (hidden_size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` (``[..., hidden_size]``) normalised, in its own dtype."""
        if self.zero_centered:  # as everybody computes it: 1 + weight has few digits left of the weight in bf16
            return F.rms_norm(x.float(), self.shape, self.weight.float() + 1, self.eps).to(x.dtype)
        return F.rms_norm(x, self.shape, self.weight.to(x.dtype), self.eps)
