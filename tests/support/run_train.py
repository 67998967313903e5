"""Run ``train.py`` as a user does, in a process of its own, and look at what it said, measured and left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.utils import process_supervisor
from slime.utils.process_guard import RUN_TAG
from tests.support.distributed import DEVICES

ROOT = Path(__file__).resolve().parents[2]
TEST_TAG = "SLIME_TEST_RUN"
LEFTOVER_DEADLINE_S = 30.0


def processes_of_run(run_id: str) -> list[int]:
    """Return the processes of this host that belong to the run ``run_id``."""
    return process_supervisor.tagged(f"{RUN_TAG}={run_id}")


def sums_file(path: Path, count: int = 32) -> Path:
    """Write ``count`` different one-digit sums as chat prompts with labels to ``path``; return it."""
    rows = [
        {"prompt": [{"role": "user", "content": f"{i % 10}+{i // 10}="}], "label": str(i % 10 + i // 10)}
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft_file(path: Path, count: int = 32) -> Path:
    """Write ``count`` conversations (a sum and its answer) to ``path``; return it."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i % 10}+{i // 10}="},
                {"role": "assistant", "content": str(i % 10 + i // 10)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rl_flags(checkpoint: Path, prompts: Path) -> list[str]:
    """Return the flags of a tiny GRPO run: 4 prompts x 4 samples per rollout, one training step each, one trainer."""
    from tools.tiny_model import megatron_flags

    words = f"""--hf-checkpoint {checkpoint} --prompt-data {prompts} --input-key prompt --label-key label
        --apply-chat-template --rm-type math --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16
        --rollout-max-response-len 16 --actor-num-gpus-per-node 1 --rollout-num-gpus 1
        --lr 1e-3 --lr-decay-style constant --use-dynamic-batch-size --max-tokens-per-gpu 2048"""
    return [*words.split(), *megatron_flags(checkpoint)]


def sft_flags(checkpoint: Path, conversations: Path) -> list[str]:
    """Return the flags of a tiny SFT run: 8 conversations per step, no engines, one trainer."""
    from tools.tiny_model import megatron_flags

    words = f"""--hf-checkpoint {checkpoint} --prompt-data {conversations} --input-key messages --rollout-shuffle
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only
        --calculate-per-token-loss --disable-compute-advantages-and-returns
        --rollout-batch-size 8 --global-batch-size 8 --n-samples-per-prompt 1 --actor-num-gpus-per-node 1
        --lr 1e-3 --lr-decay-style constant --use-dynamic-batch-size --max-tokens-per-gpu 2048"""
    return [*words.split(), *megatron_flags(checkpoint)]


@dataclass(frozen=True)
class Finished:
    """Result of a run: exit code, everything it printed, its directory, seconds."""

    returncode: int
    output: str
    run_dir: Path
    seconds: float

    def metric(self, name: str) -> dict[int, float]:
        """Return ``{step: value}`` of one metric."""
        return read_metric(self.run_dir, name)

    def values(self, name: str) -> list[float]:
        """Return the values of one metric in the order in which they were written."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [record["value"] for record in map(json.loads, lines) if record["name"] == name]


def read_metric(run_dir: Path, name: str) -> dict[int, float]:
    """Return ``{step: value}`` of one metric of a run, as far as it has been written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # it is being written
    records = [json.loads(line) for line in lines if name in line]
    return {record["step"]: record["value"] for record in records if record["name"] == name}


class Run:
    """``train.py`` (or another script) in progress; use as a context manager: nothing of it survives the block.

    ``module``: a module and its command, to run instead of the script. ``inside``: a command that runs it. The first
    look costs a start several seconds; it is taken only with ``first_look``.
    """

    def __init__(
        self,
        flags: Sequence[str],
        run_dir: Path,
        *,
        script: str = "train.py",
        module: Sequence[str] = (),
        inside: Sequence[str] = (),
        env: dict[str, str] | None = None,
        first_look: bool = False,
        device: str = "cpu",
    ) -> None:
        self.run_dir = run_dir
        self.tag = uuid.uuid4().hex
        self.started = time.monotonic()
        self._lines: list[str] = []
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", TEST_TAG: self.tag, **DEVICES[device]}
        environ.update(env or {})
        environ.pop("SLIME_RUN_ID", None)
        words = [*map(str, flags), "--run-dir", str(run_dir), *([] if first_look else ["--skip-first-look"])]
        self.process = subprocess.Popen(
            [*inside, sys.executable, *(["-m", *module] if module else [str(ROOT / script)]), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environ,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)
        process_supervisor.end(self.processes, 2.0, limit_s=20.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    @property
    def output(self) -> str:
        return "".join(self._lines)

    @property
    def run_id(self) -> str | None:
        found = re.search(r"run (\d{8}-\d{6}-\w{8}) on ", self.output)
        return found.group(1) if found else None

    def wait_for(self, pattern: str, deadline_s: float) -> str:
        """Return the first line printed that ``pattern`` matches. Fails when the run ends before, or is too late."""
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            for line in list(self._lines):
                if re.search(pattern, line):
                    return line
            if self.process.poll() is not None:
                self._reader.join(10)
                if not re.search(pattern, self.output):
                    raise AssertionError(f"the run ended before {pattern!r}:\n{self.output}{self.logs()}")
            time.sleep(0.1)
        raise AssertionError(f"no line like {pattern!r} within {deadline_s} s:\n{self.output}{self.logs()}")

    def wait_for_log(self, component: str, text: str, deadline_s: float) -> None:
        """Wait until the log of ``component`` holds ``text``."""
        path = self.run_dir / "logs" / f"{component}.log"
        end = time.monotonic() + deadline_s
        while not path.exists() or text not in path.read_text(errors="replace"):
            assert time.monotonic() < end, f"no {text!r} in {path} within {deadline_s} s:\n{self.output}{self.logs()}"
            time.sleep(0.1)

    def finish(self, timeout_s: float) -> Finished:
        """Wait for the end. Fails when it does not come within ``timeout_s``."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished after {timeout_s} s:\n{self.output}{self.logs()}") from None
        self._reader.join(10)
        return Finished(self.process.returncode, self.output, self.run_dir, time.monotonic() - self.started)

    def finish_after_signal(self, timeout_s: float, returncode: int) -> Finished:
        """Wait for the end; fail unless it comes with ``returncode``, without a traceback, and nothing is left."""
        finished = self.finish(timeout_s)
        assert finished.returncode == returncode
        assert "Traceback" not in finished.output
        assert "SystemError" not in finished.output
        self.assert_nothing_left(5)
        return finished

    def send(self, signum: signal.Signals) -> None:
        """Send a signal to the driver process alone."""
        self.process.send_signal(signum)

    def processes(self) -> list[int]:
        """Return the live processes of the run on this host: by the run's own tag and by one that only tests know."""
        mine = process_supervisor.tagged(f"{TEST_TAG}={self.tag}")
        return sorted({*mine, *(processes_of_run(self.run_id) if self.run_id else [])} - {self.process.pid})

    def process_with(self, word: str) -> int:
        """Return the one process of the run whose command line holds ``word``."""
        found = [pid for pid in self.processes() if word in command_line(pid)]
        assert len(found) == 1, f"{len(found)} processes with {word!r} in {[command_line(p) for p in self.processes()]}"
        return found[0]

    def assert_nothing_left(self, deadline_s: float = LEFTOVER_DEADLINE_S) -> float:
        """Fail when a process of the run is still there after ``deadline_s``; return the seconds until none was."""
        started = time.monotonic()
        while left := self.processes():
            if time.monotonic() - started > deadline_s:
                raise AssertionError(f"left after {deadline_s} s: {[(pid, command_line(pid)) for pid in left]}")
            time.sleep(0.2)
        return time.monotonic() - started

    def logs(self) -> str:
        """Return the ends of the component logs, for messages."""
        parts = []
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts.append(f"\n== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "".join(parts)


def run_train(
    flags: Sequence[str],
    run_dir: Path,
    *,
    script: str = "train.py",
    env: dict[str, str] | None = None,
    timeout_s: float = 300.0,
    returncode: int = 0,
    first_look: bool = False,
    device: str = "cpu",
) -> Finished:
    """Run to the end; assert the exit code and that no process is left."""
    with Run(flags, run_dir, script=script, env=env, first_look=first_look, device=device) as run:
        finished = run.finish(timeout_s)
        assert finished.returncode == returncode, f"{finished.returncode}, not {returncode}:\n{run.output}{run.logs()}"
        run.assert_nothing_left(5.0)
        return finished


def canary(output: str) -> float:
    """Return the difference between engines and trainer after the first push, as the run has logged it."""
    found = re.search(r"after the first push, log-probs .* differ .* by (\S+) on average", output)
    assert found, output
    return float(found[1])


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
