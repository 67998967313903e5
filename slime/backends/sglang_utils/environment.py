"""The environment of engine processes."""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
CPU_STANDINS = HERE / "cpu_standins"
ENGINE_PLUGIN = HERE / "engine_plugin"
PLUGIN_NAME = "slime"
"""Entry point name in ``engine_plugin``; SGLang loads only listed plugins when ``SGLANG_PLUGINS`` is set."""

DEFAULTS = {
    "SGLANG_JIT_DEEPGEMM_PRECOMPILE": "false",
    "SGLANG_JIT_DEEPGEMM_FAST_WARMUP": "true",
    "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "true",
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true",
    "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT": "true",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "false",
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1",  # read by prefill and decode engines only
}
CPU_DEFAULTS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Engines and trainers share the cores: more threads lose a factor of 5-10 under load and win little when idle.
    "OMP_NUM_THREADS": "1",
    "UCX_TLS": "tcp",  # nixl carries key-value caches with UCX, whose other transports look for devices
}
TAKES_ADAPTERS = "SLIME_TAKES_ADAPTERS"
REMOVED = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Set for trainers; SGLang's memory saver does not work with expandable segments."""


def engine_environment(
    *,
    device_type: str,
    tp_size: int = 1,
    scratch: Path | None = None,
    base: Mapping[str, str] | None = None,
    cores: list[int] | None = None,
    takes_adapters: bool = False,
) -> dict[str, str]:
    """Return the whole environment of an engine: ``base`` (default: this process's) plus what SGLang needs.

    A variable that ``base`` sets wins over the defaults here. ``scratch`` is the engine's own directory for temporary
    files: SGLang leaves its sockets there. Compiled kernels stay in the usual place. ``cores`` are those that the
    tensor-parallel ranks of a CPU engine are bound to (default: those of this process). ``takes_adapters``: whether
    the trainer pushes adapters to it.
    """
    env = dict(os.environ if base is None else base)
    for name in REMOVED:
        env.pop(name, None)
    on_cpu = device_type == "cpu"
    for name, value in {**DEFAULTS, **(CPU_DEFAULTS if on_cpu else {})}.items():
        env.setdefault(name, value)
    if on_cpu:
        # The stand-ins hide a real triton and sgl_kernel: an engine that was put on the CPU must not find a GPU.
        env["CUDA_VISIBLE_DEVICES"] = ""
        if tp_size > 1:
            env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", core_binding(tp_size, cores))
    env[TAKES_ADAPTERS] = str(int(takes_adapters))
    if scratch is not None:
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
        env["TMPDIR"] = str(scratch)
    if env.get("SGLANG_PLUGINS"):
        env["SGLANG_PLUGINS"] = f"{env['SGLANG_PLUGINS']},{PLUGIN_NAME}"
    paths = [str(ENGINE_PLUGIN), *([str(CPU_STANDINS)] if on_cpu else []), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    return env


def core_binding(tp_size: int, cores: list[int] | None = None) -> str:
    """Return SGLang's ``0,1|2,3`` notation: equal shares of ``cores`` for the ranks, reused when there are too few."""
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    share = len(cores) // tp_size
    if share == 0:
        return "|".join(str(cores[rank % len(cores)]) for rank in range(tp_size))
    return "|".join(",".join(map(str, cores[r * share : (r + 1) * share])) for r in range(tp_size))
