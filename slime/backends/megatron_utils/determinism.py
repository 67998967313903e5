"""``--deterministic-mode``: what makes two trainings on the same rollouts equal to the bit."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping

import torch

from slime.utils import accelerator

logger = logging.getLogger(__name__)

# Variable -> (the value it gets when it is not set, further values with which sums are made in one order).
# NCCL chooses its algorithm by measured speed, cuBLAS splits sums over workspaces that streams compete for, and
# TransformerEngine's attention adds the gradients of keys in the order in which blocks finish.
VARIABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "NCCL_ALGO": ("Ring", ("Tree", "CollnetDirect", "CollnetChain", "^NVLS")),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", (":16:8",)),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0", ()),
}


def enable_deterministic_mode(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make torch choose deterministic kernels, and on CUDA its libraries too. Call before any of them starts.

    Raises ValueError when a variable is set to a value under which results differ from run to run; those that are not
    set are. An operation without a deterministic kernel raises RuntimeError when it is called.
    """
    if accelerator.device_type() == "cuda":
        for name, (default, others) in VARIABLES.items():
            value = environment.setdefault(name, default)
            if value not in (default, *others):
                raise ValueError(
                    f"--deterministic-mode: results depend on the run with {name}={value}; expected "
                    f"{' or '.join((default, *others))}. Set it with --train-env-vars, or leave it out"
                )
        logger.info("deterministic mode: %s", ", ".join(f"{name}={environment[name]}" for name in VARIABLES))
    torch.use_deterministic_algorithms(True)
