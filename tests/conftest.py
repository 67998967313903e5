"""Rules for every test: one thread per process, GPU tests that skip with a reason, nothing left running."""

from __future__ import annotations

import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

# Before torch is imported anywhere: several processes share the cores, and more threads than cores only wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")

import hypothesis
import pytest

# A busy machine is no failure. The same examples every time, but in soak, which searches for others.
IN_SOAK = "soak or gpu" in sys.argv
hypothesis.settings.register_profile("search", deadline=None, print_blob=True)
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("search" if IN_SOAK else "same")
pytest.register_assert_rewrite("tests.support")  # what they found is shown, as in a test

# A shell starts background jobs (`make test &`, nohup, some CI runners) with Ctrl-C ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARK = "SLIME_TEST_SESSION"
LEFTOVER_PATIENCE_S = 30.0
ENDS_WITH_ITS_PARENT = ("multiprocessing.resource_tracker", "addr2line")  # the second: torch's record of GPU memory


@cache
def gpu_missing() -> str | None:
    """Return why GPU tests cannot run here, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "needs a CUDA device: no nvidia-smi on this machine"
    result = subprocess.run([tool, "--list-gpus"], capture_output=True, text=True, timeout=60)
    if result.returncode or "GPU" not in result.stdout:
        return f"needs a CUDA device: nvidia-smi lists none ({result.stderr.strip() or result.stdout.strip()})"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--durations-file FILE``: what tests cost, printed at the end and written to FILE."""
    parser.addoption("--durations-file", metavar="FILE", type=Path, help="write seconds by test and by file to FILE")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what the tests cost, where it was asked for."""
    path: Path | None = config.getoption("durations_file")
    if path is not None:
        from tests.support.durations import write_summary

        reports = (report for reports in terminalreporter.stats.values() for report in reports)
        terminalreporter.section(f"durations, written to {path}")
        terminalreporter.write(write_summary(config.rootpath / path, reports))


SOAK_TESTS = pytest.StashKey[list[str]]()
"""The ids of the soak and GPU tests that were collected, which ``-m`` may leave out afterwards."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; everything below tests/integration and tests/soak carries its marker."""
    here = Path(__file__).parent
    for item in items:
        folder = Path(item.path).relative_to(here).parts[0]
        if folder in ("integration", "soak"):
            item.add_marker(folder)
        if IN_SOAK and hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("soak")
        if item.get_closest_marker("gpu") and (reason := gpu_missing()):
            item.add_marker(pytest.mark.skip(reason=reason))
    marked = (item for item in items if item.get_closest_marker("soak") or item.get_closest_marker("gpu"))
    config.stash[SOAK_TESTS] = [item.nodeid for item in marked]


def pytest_collection_finish() -> None:
    """Spare every test what collecting has imported.

    A full garbage collection takes a quarter of a second with it. And to each logger of torch that does not propagate,
    some forty, pytest adds two handlers before the set-up, the call and the end of every test.
    """
    gc.collect()
    gc.freeze()
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Draw the same numbers in a test whatever ran before it."""
    random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail the session when a process that a test started outlives it, however it was detached."""
    token = uuid.uuid4().hex
    os.environ[MARK] = token
    yield
    if workers := sys.modules.get("slime.rollout.rm_hub.workers"):
        workers.close_reward_workers()  # they serve a process to its end, and this one has not come to it
    if parsers := sys.modules.get("slime.agent.sglang_parsers"):
        parsers.close()
    if server := sys.modules.get("multiprocessing.forkserver"):
        server._forkserver._stop()  # it ends with this process, which has not come to its end
    deadline = time.monotonic() + LEFTOVER_PATIENCE_S
    while (left := marked_processes(token)) and time.monotonic() < deadline:
        time.sleep(0.5)
    del os.environ[MARK]
    if left:
        pytest.fail("processes started by tests are still running:\n" + "\n".join(left), pytrace=False)


def marked_processes(token: str) -> list[str]:
    """Return ``pid command`` of the live processes, this one excepted, whose environment holds ``token``."""
    wanted = f"{MARK}={token}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        if directory.name == str(os.getpid()):
            continue
        try:
            if wanted not in (directory / "environ").read_bytes().split(b"\0"):
                continue
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # ended meanwhile, or belongs to somebody else
        if command and not any(helper in command for helper in ENDS_WITH_ITS_PARENT):
            found.append(f"  {directory.name} {command[:300]}")
    return found
