"""The fork server of the engines of a host without a GPU: SGLang is imported once, while Ray starts, not per engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from slime.backends.sglang_utils.environment import INIT_METHOD, TAKES_ADAPTERS, engine_environment
from slime.utils import fork_server
from slime.utils.process_guard import KEEP_ENVIRON

SOCKET = "SLIME_ENGINE_FORK_SERVER"
"""The variable by which the processes of a run find it."""
MODULE = "sglang.launch_server"
PRELOAD = "slime_engine_plugin.server.preload"
READ = (
    "CUDA", "FLASHINFER", "GLOO", "GOMP", "HF_", "KMP", "LD_", "MALLOC", "MKL", "MOONCAKE", "NCCL", "NIXL", "NUMBA",
    "OMP_", "OPENBLAS", "PYTHONHASHSEED", "PYTHONPATH", "PYTORCH", "SGLANG", "SGL_", "SLIME_STOCK_CPU_ATTENTION",
    TAKES_ADAPTERS, "TOKENIZERS", "TORCH", "TRANSFORMERS", "TRITON", "UCX", "XDG",
)  # fmt: skip
"""Beginnings of the variables that SGLang, its packages and the plugin read while they are imported."""
VARYING = (INIT_METHOD, "SGLANG_CPU_OMP_THREADS_BIND", "TORCHINDUCTOR_CACHE_DIR")
"""Of these, what differs between engines: SGLang reads it when they start."""


def fork_server_of_engines() -> str | None:
    """Return the socket of the fork server, None where there is none."""
    return os.environ.get(SOCKET)


def start_fork_server(path: str, base: Mapping[str, str], *, takes_adapters: bool) -> subprocess.Popen[bytes]:
    """Start the server, for engines of processes that have the environment ``base``; it ends with this thread."""
    env = engine_environment(device_type="cpu", base=base, takes_adapters=takes_adapters)
    return fork_server.start(path, MODULE, PRELOAD, {**env, **KEEP_ENVIRON}, READ, VARYING)
