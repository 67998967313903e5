"""What launch scripts written in Python call: get data, find checkpoints, start a run.

Nothing here ends a process or a Ray cluster that it has not started: a run on one machine starts a Ray of its own and
ends it, and a cluster that is already there is joined.
"""

from __future__ import annotations

import datetime
import os
import random
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from slime.utils.external_utils.checkpoint_links import make_loadable
from slime.utils.external_utils.train_command import (
    ExecuteTrainConfig,
    execute_train,
    get_bool_env_var,
    is_dry_run,
    repo_base_dir,
)
from slime.utils.misc import exec_command as run_command

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

HOME = str(Path.home())
"""Where checkpoints and data sets are by default: in the containers that such scripts run in, the home of root."""


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


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Write the FP8 checkpoint ``path_src`` in bf16 to ``path_dst``; leave that as it is when it exists.

    Raises what ``fp8_checkpoint.cast_to_bf16`` raises.
    """
    from slime.utils.external_utils.fp8_checkpoint import cast_to_bf16

    if Path(path_dst).exists():
        print(f"{path_dst} exists already", flush=True)
        return
    if is_dry_run():
        print(f"{path_dst} would be {path_src} in bf16, but not in a dry run", flush=True)
        return
    cast_to_bf16(Path(path_src), Path(path_dst))


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


def check_has_nvlink() -> bool:
    """Return whether GPUs of this machine are connected by NVLink; False without ``nvidia-smi``."""
    if shutil.which("nvidia-smi") is None:
        return False
    links = run_command("nvidia-smi topo -m 2>/dev/null | { grep -Eo 'NV[0-9]+' || true; } | wc -l", True)
    return int(links or 0) > 0
