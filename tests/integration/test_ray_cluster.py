"""A run on a Ray cluster that is there already, and under ``ray job submit``: it leaves the cluster alone."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.ports import reserve_ports
from slime.utils.process_guard import spawn
from tests.support.run_train import (
    ROOT,
    Run,
    processes_of_run,
    read_metric,
    rl_flags,
    run_train,
    sft_file,
    sft_flags,
    sums_file,
)
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
RAY = str(Path(sys.executable).with_name("ray"))


class RayHead:
    """``ray start --head --block`` with 2 CPUs and no resources of slime's, on ports of its own."""

    def __init__(self, root: Path) -> None:
        port, self.dashboard, agent, metrics, client = reserve_ports(5)
        self.address = f"127.0.0.1:{port}"
        # Clients of a cluster need to know of token authentication. A token of our own touches no file of the user's.
        self.auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.joining = {"RAY_ADDRESS": self.address, **self.auth}
        self.env = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "SLIME_RUN_ID")} | self.auth
        command = f"""{RAY} start --head --block --num-cpus 2 --node-ip-address 127.0.0.1 --port {port}
            --dashboard-host 127.0.0.1 --dashboard-port {self.dashboard} --dashboard-agent-listen-port {agent}
            --metrics-export-port {metrics} --ray-client-server-port {client} --object-store-memory 200000000
            --min-worker-port 0 --max-worker-port 0 --disable-usage-stats --temp-dir {root}"""
        self.process = spawn(command.split(), {**self.env, "OMP_NUM_THREADS": "1"}, root / "head.log", "the Ray head")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + 240
        while (listed := self.ray("job", "list")).returncode != 0:
            assert self.process.poll() is None, self.process.last_lines()
            assert time.monotonic() < deadline, (listed.stderr, self.process.last_lines())
            time.sleep(1)

    def ray(self, *words: str, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        env = {**self.env, "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{self.dashboard}"}
        return subprocess.run([RAY, *words], env=env, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Iterator[RayHead]:
    # Ray's sockets live under its directory, and their paths must be short.
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as root:
        started = RayHead(Path(root))
        try:
            started.wait_ready()
            yield started
        finally:
            started.process.stop(3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("cluster") / "model")


def test_a_killed_driver_leaves_the_cluster_and_nothing_of_its_own(head, model, tmp_path):
    flags = [*rl_flags(model, sums_file(tmp_path / "sums.jsonl")), "--num-rollout", "100000", "--use-distributed-post"]
    with Run(flags, tmp_path / "run", env=head.joining) as run:
        run.wait_for(r"rollout 1 of", 240)
        port = head.address.rpartition(":")[2]
        assert re.search(rf"on Ray at [\d.]+:{port}: CPU 2, device cpu", run.output), run.output
        run.wait_for_log("rollout_manager", "1 helper processes send up to", 1.0)
        run_id = run.run_id
        assert (
            len(processes_of_run(run_id)) >= 7
        )  # manager, poster, trainer, engine actor, router, engine and its scheduler
        run.process.kill()
        run.process.wait(10)
        assert run.assert_nothing_left() < 30
        assert not processes_of_run(run_id)
    difference = read_metric(tmp_path / "run", "train/train_rollout_logprob_abs_diff")
    assert {0, 1} <= difference.keys()
    assert max(difference.values()) <= 1e-5
    assert head.process.poll() is None


def test_job_submit(head, model, tmp_path):
    flags = [
        *sft_flags(model, sft_file(tmp_path / "sft.jsonl")),
        *["--num-rollout", "2", "--run-dir", str(tmp_path / "run"), "--skip-first-look"],
    ]
    environment = json.dumps({"env_vars": {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}})
    job = head.ray(
        "job", "submit", "--runtime-env-json", environment, "--", sys.executable, str(ROOT / "train.py"), *flags
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert "rollout 1 of 2" in job.stdout
    assert sorted(read_metric(tmp_path / "run", "train/loss")) == [0, 1]
    assert head.process.poll() is None


@pytest.mark.soak
def test_stopping_a_submitted_job_ends_the_run(head, model, tmp_path):
    """It sends SIGTERM. On every change: SIGINT in test_run_security.py, what is left on a cluster above."""
    flags = [*sft_flags(model, sft_file(tmp_path / "sft.jsonl")), "--num-rollout", "100000"]
    flags += ["--run-dir", str(tmp_path / "run"), "--skip-first-look"]
    name = "to-be-stopped"
    head.ray(
        "job", "submit", "--no-wait", "--submission-id", name, "--", sys.executable, str(ROOT / "train.py"), *flags
    )
    deadline = time.monotonic() + 120
    while not read_metric(tmp_path / "run", "train/loss"):
        assert time.monotonic() < deadline, head.ray("job", "logs", name).stdout
        time.sleep(0.5)
    log = head.ray("job", "logs", name).stdout
    run_id = re.search(r"run (\d{8}-\d{6}-\w{8}) on ", log).group(1)
    assert processes_of_run(run_id), log
    head.ray("job", "stop", name)
    deadline = time.monotonic() + 30
    while left := processes_of_run(run_id):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def test_more_slots_than_the_cluster_has(head, model, tmp_path):
    flags = [*sft_flags(model, sft_file(tmp_path / "sft.jsonl")), "--num-rollout", "1"]
    flags += ["--actor-num-gpus-per-node", "300", "--placement-timeout", "3", "--ray-address", head.address]
    flags += ["--rollout-batch-size", "300", "--global-batch-size", "300"]
    failed = run_train(flags, tmp_path / "run", env=head.auth, returncode=1)
    assert "300 slots of [CPU 0.01] are not placed within --placement-timeout 3 s" in failed.output
    assert "300 for training" in failed.output
    assert re.search(r"  node [\d.]+: CPU 2 \(free: CPU 2\)", failed.output), failed.output


def test_an_address_without_a_cluster(model, tmp_path):
    flags = [*sft_flags(model, sft_file(tmp_path / "sft.jsonl")), "--num-rollout", "1"]
    failed = run_train([*flags, "--ray-address", "127.0.0.1:1"], tmp_path / "run", returncode=1)
    assert "error: ConnectionError: cannot join the Ray cluster '127.0.0.1:1' that --ray-address names" in failed.output
