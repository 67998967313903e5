"""The launcher of the other Megatron tests, and the order of imports in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.distributed import run_distributed

pytestmark = pytest.mark.integration


def echo(values: list[int]) -> tuple[int, str]:
    return values[int(os.environ["RANK"])], os.environ["WORLD_SIZE"]


def fail_on_rank_one(folder: str) -> None:
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    if os.environ["RANK"] == "1":
        raise ValueError("rank one is unhappy")
    time.sleep(600)


def hang_with_a_child(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    (Path(folder) / "pids").write_text(f"{os.getpid()} {child.pid}")
    time.sleep(600)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_are_returned_in_rank_order() -> None:
    assert run_distributed(f"{__name__}:echo", 2, {"values": [10, 20]}, timeout=60) == [(10, "2"), (20, "2")]


def test_a_failing_rank_ends_all_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank\(s\) \[1\] of 2 failed[\s\S]*rank one is unhappy"):
        run_distributed(f"{__name__}:fail_on_rank_one", 2, {"folder": str(tmp_path)}, timeout=60)
    assert not any(_alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_the_deadline_ends_ranks_and_their_children(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) \[0\] of 1 still ran after 10 s"):
        run_distributed(f"{__name__}:hang_with_a_child", 1, {"folder": str(tmp_path)}, timeout=10)
    assert not any(_alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_megatron_before_the_adapter_is_an_error() -> None:
    code = """
import torch
if torch.cuda.is_available():
    raise SystemExit("RuntimeError: import_megatron() skipped: the adapter does nothing here")
import megatron.core
from slime.backends.megatron_utils import import_megatron
import_megatron()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "RuntimeError" in done.stderr
    assert "import_megatron()" in done.stderr


def test_the_package_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, slime.backends.megatron_utils; sys.exit(any(m in sys.modules for m in ('torch', 'megatron')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
