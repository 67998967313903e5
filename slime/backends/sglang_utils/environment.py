"""The environment of engine processes: their variables, and files that must not outlive them."""

from __future__ import annotations

import fcntl
import getpass
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

from slime.utils.atomic_file import FULL, open_private
from slime.utils.secrets import public_environment
from slime.weights.p2p.agents import UCX_OVER_TCP

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
    # Read by prefill and decode engines only. Without the probe, mooncake never sends to an engine again to which one
    # transfer has failed.
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "1",
    "SGLANG_ENABLE_FAILED_SESSION_PROBE": "1",
    "SGLANG_FAILED_SESSION_PROBE_INTERVAL_S": "5",
}
CPU_DEFAULTS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Engines and trainers share the cores: more threads lose a factor of 5-10 under load and win little when idle.
    "OMP_NUM_THREADS": "1",
    # Of what the convolutions of delta nets have seen: bf16 would be the only rounded part of an fp32 engine.
    "SGLANG_MAMBA_CONV_DTYPE": "float32",
    # Between prefill and decode engines.
    **UCX_OVER_TCP,
    "MOONCAKE_PROTOCOL": "tcp",
}
INIT_METHOD = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
TAKES_ADAPTERS = "SLIME_TAKES_ADAPTERS"
REMOVED = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Set for trainers; SGLang's memory saver does not work with expandable segments."""

PREFIX = "slime-engine-"
MEETING = "slime-meeting-"
SHARED_MEMORY = Path("/dev/shm")
"""The engine's files there begin with the name of its directory (``slime_engine_plugin/server/files.py``)."""
OWNER = "owner.lock"
SWEEP_AGE_S = 60.0
"""An engine may live some seconds longer than its owner."""


def engine_environment(
    *,
    device_type: str,
    tp_size: int = 1,
    scratch: Path | None = None,
    base: Mapping[str, str] | None = None,
    cores: list[int] | None = None,
    takes_adapters: bool = False,
    meets_at_file: bool = False,
) -> dict[str, str]:
    """Return the whole environment of an engine: ``base`` plus what SGLang needs.

    ``base`` is by default that of this process, without secrets.

    A variable that ``base`` sets wins over the defaults here. ``scratch`` is the engine's own directory for temporary
    files: SGLang leaves its sockets there. Compiled kernels stay in the usual place. ``cores`` are those that the
    tensor-parallel ranks of a CPU engine are bound to (default: those of this process). ``takes_adapters``: whether
    the trainer pushes adapters to it. ``meets_at_file``: whether its ranks, which are all on this host, meet at a file.
    """
    env = public_environment() if base is None else dict(base)
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
    if meets_at_file and scratch is not None:
        env[INIT_METHOD] = f"file://{scratch / 'ranks'}"
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


class Scratch:
    """A private directory, of an engine by default, for temporary files and secrets.

    ``path`` is short: it holds Unix sockets, whose paths may have at most 107 characters.

    It is removed by :meth:`remove`, or when this process ends. What a killed process left is removed by the next one
    that makes a directory.
    """

    def __init__(self, prefix: str = PREFIX) -> None:
        sweep(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        # Held until this process ends: by it others see that the directory is in use.
        lock = os.open(self.path / OWNER, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._finalizer = weakref.finalize(self, _remove, self.path, lock)
        self._secrets: Path | None = None

    def write_secrets(self, fields: Mapping[str, str]) -> Path:
        """Write SGLang options to a YAML file that only this user can read, and return its path."""
        self._secrets = self.path / "secrets.yaml"
        fd = os.open(self._secrets, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(fd, "w") as file:
            file.writelines(f"{name.replace('_', '-')}: {json.dumps(value)}\n" for name, value in fields.items())
        return self._secrets

    def remove_secrets(self) -> None:
        """The server has read its options: remove the file."""
        if self._secrets is not None:
            self._secrets.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove everything; who uses it must have ended. Calling it again does nothing."""
        self._finalizer()


def sweep(directory: Path, prefix: str = PREFIX) -> None:
    """Remove what killed owners have left in ``directory``."""
    for path in directory.glob(f"{prefix}*"):
        try:
            lock = os.open(path / OWNER, os.O_WRONLY | os.O_CLOEXEC)
        except OSError:
            continue  # another user's, or being made or removed at this moment
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_old = time.time() - path.stat().st_mtime > SWEEP_AGE_S
        except OSError:
            os.close(lock)
            continue  # its owner is alive
        if is_old:
            _remove(path, lock)
        else:
            os.close(lock)


def _remove(directory: Path, lock: int) -> None:
    for path in SHARED_MEMORY.glob(f"{directory.name}-*"):
        path.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    os.close(lock)


def make_private(log_path: Path) -> None:
    """Create the log if need be and let only this user read it. On a full disk there is none."""
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        os.close(open_private(log_path))
    except OSError as e:
        if e.errno not in FULL:
            raise
