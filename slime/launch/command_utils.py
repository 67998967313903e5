"""Functions for launch scripts written in Python: get data, find checkpoints, start a run.

Nothing here ends a process or a Ray cluster that it has not started: a run on one machine starts its own Ray and
ends it, and a cluster that is already there is joined.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import slime
from slime.utils.misc import exec_command as run_command
from slime.weights.hf.checkpoint import read_config

__all__ = [
    "ExecuteTrainConfig",
    "check_has_nvlink",
    "convert_checkpoint",
    "create_run_id",
    "exec_command",
    "execute_train",
    "fp8_cast_bf16",
    "get_bool_env_var",
    "get_default_wandb_args",
    "hf_download_dataset",
    "repo_base_dir",
    "save_to_temp_file",
]

repo_base_dir = Path(slime.__file__).resolve().parents[1]
"""The directory of ``train.py``, ``scripts`` and ``tools``."""

LOCAL_DASHBOARD = "http://127.0.0.1:8265"
CORE_DUMP_ENVIRONMENT = {
    "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
    "CUDA_COREDUMP_SHOW_PROGRESS": "1",
    "CUDA_COREDUMP_FILE": "/tmp/cuda_coredump_%h.%p.%t",
}
HOME = str(Path.home())
"""The default place of checkpoints and data sets: the home of root in the containers that such scripts run in."""


# The command line that starts a run, and where it is run: here, or as a job of a Ray cluster


@dataclass
class ExecuteTrainConfig:
    """Start settings of a script's run; scripts add their own fields.

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
    ``train_args`` win. ``before_ray_job_submit`` is called just before. ``megatron_path`` is added to ``PYTHONPATH``.

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
    """Return True if ``SLIME_DRY_RUN`` asks to check only the flags: nothing is fetched, converted or started."""
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
    """Return the variables that the run gets besides the environment of this script; ``extra`` wins."""
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


# What scripts do before


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a bash command line as ``slime.utils.misc.exec_command`` does; a dry run prints it alone."""
    if is_dry_run():
        print(f"EXEC, but not in a dry run: {cmd}", flush=True)
        return "" if capture_output else None
    return run_command(cmd, capture_output)


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str = HOME,
    hf_checkpoint: str | None = None,
) -> None:
    """Make ``<dir_dst>/<model_name>_torch_dist`` usable as ``--ref-load`` or ``--load``; leave it when it exists.

    Trainers read Hugging Face checkpoints themselves, so it becomes a link to ``hf_checkpoint`` (default
    ``~/models/<model_name>``), or a bf16 copy of one in FP8, and the other arguments are not needed. Raises
    FileNotFoundError when that is no Hugging Face checkpoint.
    """
    del megatron_model_type, num_gpus_per_node, multinode, extra_args
    source = Path(hf_checkpoint or f"{HOME}/models/{model_name}")
    target = Path(dir_dst) / f"{model_name}_torch_dist"
    if target.exists():
        print(f"{target} exists already", flush=True)
        return
    if is_dry_run():
        print(f"{target} would be made of {source}, but not in a dry run", flush=True)
        return
    make_loadable(source, target)


def hf_download_dataset(full_name: str, data_dir: str = f"{HOME}/datasets") -> None:
    """Download the data set ``owner/name`` of the Hugging Face hub to ``<data_dir>/name``.

    Raises ValueError for another form of name, FileNotFoundError without the ``hf`` program and RuntimeError when it
    fails.
    """
    owner, _, name = full_name.partition("/")
    if not owner or not name or "/" in name:
        raise ValueError(f"a data set of the hub is named owner/name, got {full_name!r}")
    hf = shutil.which("hf", path=Path(sys.executable).parent) or shutil.which("hf")
    if hf is None and is_dry_run():
        hf = "hf"
    if hf is None:
        raise FileNotFoundError("the program `hf` downloads data sets: pip install huggingface_hub")
    exec_command(
        shlex.join([hf, "download", "--repo-type", "dataset", full_name, "--local-dir", str(Path(data_dir, name))])
    )


def make_loadable(source: Path, target: Path) -> None:
    """Make ``target`` usable as ``--load`` or ``--ref-load``: a link to ``source``, or of a quantized one a bf16 copy.

    Trainers read Hugging Face checkpoints themselves, so there is nothing else to convert. An empty ``target`` is
    replaced. Raises FileNotFoundError when ``source`` is no Hugging Face checkpoint and FileExistsError when
    ``target`` is something else already.
    """
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"{source} is no Hugging Face checkpoint (it has no config.json), so {target} cannot be made of it; "
            "download the model there, or name the directory where it is"
        )
    if target.exists() and target.resolve() == source.resolve():
        print(f"{target} is {source} already", flush=True)
        return
    if target.is_symlink() and not target.exists():
        target.unlink()  # a link to something that has gone
    if target.is_dir() and not target.is_symlink() and not any(target.iterdir()):
        target.rmdir()
    if target.exists() or target.is_symlink():
        raise FileExistsError(f"{target} exists already and is not {source}: remove it or choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    if read_config(source).get("quantization_config"):
        from slime.weights.quantization.files import to_bf16

        to_bf16(source, target)
        print(f"{target} is {source} in bf16", flush=True)
        return
    target.symlink_to(source.resolve(), target_is_directory=True)
    print(f"{target} is a link to {source}: trainers read Hugging Face checkpoints, nothing to convert", flush=True)


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Write the FP8 checkpoint ``path_src`` in bf16 to ``path_dst``; leave that as it is when it exists.

    Raises what ``quantization.files.to_bf16`` raises.
    """
    if Path(path_dst).exists():
        print(f"{path_dst} exists already", flush=True)
        return
    if is_dry_run():
        print(f"{path_dst} would be {path_src} in bf16, but not in a dry run", flush=True)
        return
    from slime.weights.quantization.files import to_bf16

    to_bf16(Path(path_src), Path(path_dst))


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Return the flags that log a run of script ``test_file`` to W&B; nothing without ``WANDB_API_KEY``.

    The project is ``slime-<script>``, the group ``[<run_name_prefix>_]<run_id>[_$GITHUB_COMMIT_NAME]``. The key is put
    in by the shell that starts the run, so that it is in no log of the script.
    """
    if not os.environ.get("WANDB_API_KEY"):
        print("nothing is logged to W&B: WANDB_API_KEY is not set", flush=True)
        return ""
    script = Path(test_file)
    name = script.stem if len(script.stem) >= 6 else f"{script.parent.name}_{script.stem}"  # "run" says too little
    parts = (run_name_prefix, run_id or create_run_id(), os.environ.get("GITHUB_COMMIT_NAME"))
    group = "_".join(part for part in parts if part)
    return (
        f"--use-wandb --wandb-project slime-{name} --wandb-group {group} --wandb-key ${{WANDB_API_KEY}} "
        "--disable-wandb-random-suffix "
    )


def create_run_id() -> str:
    """Return a name for a run that sorts by time: ``yymmdd-hhmmss-nnn``, in UTC, with a random number at the end."""
    now = datetime.datetime.now(datetime.UTC)
    return f"{now:%y%m%d-%H%M%S}-{random.Random().randrange(1000):03d}"


def save_to_temp_file(text: str, ext: str) -> str:
    """Write ``text`` to a new file that ends with ``.<ext>`` and return its path. The file stays until it is deleted.

    Readable by this user only: configurations may hold keys.
    """
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="slime_", suffix=f".{ext.lstrip('.')}", delete=False
    ) as file:
        file.write(text)
    return file.name


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether variable ``name`` is ``true`` or ``1``, in any case.

    Raises ValueError for anything but true, 1, false and 0.
    """
    value = os.environ.get(name, default)
    if value.lower() not in ("true", "1", "false", "0"):
        raise ValueError(f"the environment variable {name} must be true, 1, false or 0, got {value!r}")
    return value.lower() in ("true", "1")


def check_has_nvlink() -> bool:
    """Return whether GPUs of this machine are connected by NVLink; False without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return False
    links = run_command("nvidia-smi topo -m 2>/dev/null | { grep -Eo 'NV[0-9]+' || true; } | wc -l", True)
    return int(links or 0) > 0
