"""The command line that starts a run, and where it is run: here, or as a job of a Ray cluster."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import slime

repo_base_dir = Path(slime.__file__).resolve().parents[1]
"""The directory of ``train.py``, ``scripts`` and ``tools``."""

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
CORE_DUMP_ENVIRONMENT = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    "CUDA_COREDUMP_FILE": "/tmp/cuda_coredump_%h.%p.%t",
}


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether variable ``name`` is ``true`` or ``1``, in any case.

    Raises ValueError for anything but true, 1, false and 0.
    """
    value = os.environ.get(name, default)
    if value.lower() not in ("true", "1", "false", "0"):
        raise ValueError(f"the environment variable {name} must be true, 1, false or 0, got {value!r}")
    return value.lower() in ("true", "1")


@dataclass
class ExecuteTrainConfig:
    """How a script starts its run; scripts add fields of their own.

    cuda_core_dump: write a core file when a kernel fails. num_nodes: nodes of the run (default that of the Slurm job,
    else 1). extra_env_vars: more variables, as ``A=1 B=2``.
    """

    cuda_core_dump: bool = False
    num_nodes: int = field(default_factory=lambda: int(os.environ.get("SLURM_JOB_NUM_NODES", "1")))
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
    megatron_path: str | None = None,
) -> None:
    """Run ``train_script`` with the flags ``train_args`` (shell words) and wait for its end.

    ``--num-gpus-per-node`` and the flags of ``scripts/models/<megatron_model_type>.sh`` come first, so that
    ``train_args`` win. ``before_ray_job_submit`` is called just before. ``megatron_path`` goes on ``PYTHONPATH``.

    With the address of a dashboard (``RAY_API_SERVER_ADDRESS``, ``RAY_ADDRESS=http://...``, or
    ``SLIME_SCRIPT_EXTERNAL_RAY=1`` for ``http://127.0.0.1:8265``) the run is submitted as a Ray job whose processes all
    get ``extra_env_vars``; otherwise it runs here. ``SLIME_SCRIPT_ENABLE_RAY_SUBMIT=0`` prints the command and runs
    nothing, ``SLIME_DRY_RUN=1`` checks the flags and starts nothing.

    Raises FileNotFoundError for an unknown script or model, ValueError for several nodes without a cluster, and
    RuntimeError, with the exit status, when the run fails.
    """
    config = config or ExecuteTrainConfig()
    dry_run = is_dry_run()
    dashboard = None if dry_run else _dashboard()
    if config.num_nodes > 1 and not (dry_run or dashboard or os.environ.get("RAY_ADDRESS")):
        raise ValueError(
            f"{config.num_nodes} nodes need a Ray cluster: `ray start --head` on the first, `ray start --address "
            "FIRST:6379` on the others, then RAY_ADDRESS=http://FIRST:8265 in the environment of this script"
        )
    environment = _environment(config, extra_env_vars or {}, megatron_path)
    preparation = "" if megatron_model_type is None else _define_model_args(megatron_model_type)
    program = _program(train_script, num_gpus_per_node, with_model_args=megatron_model_type is not None)
    program = f"{program} {train_args.strip()}{' --dry-run' if dry_run else ''}"
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    print(f"EXEC: {preparation}{program}" + (f" (a job of {dashboard})" if dashboard else ""), flush=True)
    if not get_bool_env_var("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "1"):
        return
    if dashboard:
        program = f"{_submission(dashboard, environment)} {program}"
    line = f"{preparation}exec {program}"
    status = _wait_for(subprocess.Popen(["bash", "-c", line], env={**os.environ, **environment}))
    if status != 0:
        raise RuntimeError(f"{train_script} exited with {status}")


def is_dry_run() -> bool:
    """Whether ``SLIME_DRY_RUN`` asks for a check of the flags alone: nothing is fetched, converted or started."""
    return os.environ.get("SLIME_DRY_RUN", "0") != "0"


def _wait_for(run: subprocess.Popen[bytes]) -> int:
    try:
        return run.wait()
    except KeyboardInterrupt:  # the terminal interrupts the run too: let it end what it has started
        run.wait()
        raise


def _define_model_args(megatron_model_type: str) -> str:
    """The shell words that define the array of the model's flags."""
    model = repo_base_dir / "scripts" / "models" / f"{megatron_model_type}.sh"
    if not model.is_file():
        raise FileNotFoundError(f"megatron_model_type {megatron_model_type!r}: there is no {model}")
    return f"source {shlex.quote(str(model))} && "


def _program(train_script: str, num_gpus_per_node: int, *, with_model_args: bool) -> str:
    script = repo_base_dir / train_script
    if not script.is_file():
        raise FileNotFoundError(f"no program {script}; train_script is relative to {repo_base_dir}")
    words = shlex.join([sys.executable, str(script), "--num-gpus-per-node", str(num_gpus_per_node)])
    return words + (' "${MODEL_ARGS[@]}"' if with_model_args else "")


def _environment(config: ExecuteTrainConfig, extra: Mapping[str, str], megatron_path: str | None) -> dict[str, str]:
    """What the run gets beside the environment of this script; ``extra`` wins."""
    path = [str(repo_base_dir), megatron_path, os.environ.get("PYTHONPATH")]
    found = {"PYTHONPATH": os.pathsep.join(part for part in path if part)}
    if config.cuda_core_dump:
        found |= CORE_DUMP_ENVIRONMENT
    for word in shlex.split(config.extra_env_vars):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"extra_env_vars {config.extra_env_vars!r}: expected NAME=VALUE, got {word!r}")
        found[name] = value
    return found | {name: str(value) for name, value in extra.items()}


def _dashboard() -> str | None:
    """The address to submit a job to, as ``ray job submit`` looks for it, or None."""
    if address := os.environ.get("RAY_API_SERVER_ADDRESS"):
        return address
    if os.environ.get("RAY_ADDRESS", "").startswith(("http://", "https://")):
        return os.environ["RAY_ADDRESS"]
    return LOCAL_DASHBOARD if get_bool_env_var("SLIME_SCRIPT_EXTERNAL_RAY") else None


def _submission(dashboard: str, environment: Mapping[str, str]) -> str:
    """The words before those of a program that make it a job with these variables in all its processes."""
    beside_python = Path(sys.executable).parent / "ray"
    ray = str(beside_python) if beside_python.is_file() else "ray"
    runtime_env = json.dumps({"env_vars": dict(environment)})
    submit = [ray, "job", "submit", "--address", dashboard, "--runtime-env-json", runtime_env, "--"]
    # a job begins in a directory of Ray's; env -C takes it back here, so that relative paths hold
    return shlex.join([*submit, "env", "-C", os.getcwd()])
