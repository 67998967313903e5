"""Slots on a cluster with GPUs. Ray takes our word that there are four: placing needs no device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.machines import Machines
from tests.support.run_train import ROOT, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration


def test_slots_are_gpus_in_order_and_engines_follow_trainers(tmp_path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags += ["--num-rollout", "1", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "2"]
    flags += ["--run-dir", str(tmp_path / "run")]
    env = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "tests/support/placement_probe.py", *flags],
        cwd=ROOT,
        env={**env, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert first["device"] == "cuda"
    assert first["trainer"] == {"num_cpus": 0.4, "num_gpus": 0.4}  # actor, critic and engine share a GPU
    assert [gpus for _, gpus in (first["placed"]["actor"], first["placed"]["rollout"])] == [[0, 1, 2, 3], [2, 3]]
    assert first["placed"]["rollout"][0] == first["placed"]["actor"][0][2:]
    assert "5 slots of [GPU 1, CPU 1] are not placed within --placement-timeout 2 s" in second["refused"]
    assert "2 for training" in second["refused"]
    assert "CPU 8, GPU 4 (free: CPU 4)" in second["refused"]


MANAGERS = """import time
import ray
from slime.ray.cluster import Cluster

class Manager:
    def node(self):
        return ray.get_runtime_context().get_node_id()

ray.init(logging_level=40)
here = ray.get_runtime_context().get_node_id()
options = Cluster("r", False, "cpu", {}, here, None).whole_cpu()
print("connected", flush=True)
while len(ray.nodes()) < 2:
    time.sleep(0.005)
managers = [ray.remote(Manager).options(**options).remote() for _ in range(8)]
print(sum(ray.get(manager.node.remote(), timeout=60) == here for manager in managers), flush=True)
"""


def test_the_manager_is_on_the_node_of_the_driver_when_another_has_just_joined():
    """That node, asked to place an actor that needs nothing, knows itself before it knows others."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as root,
        Machines(Path(root), head_slots=2, slots=1) as machines,
        subprocess.Popen(
            [sys.executable, "-c", MANAGERS],
            cwd=ROOT,
            env={**os.environ, **machines.joining},
            stdout=subprocess.PIPE,
            text=True,
        ) as driver,
    ):
        assert driver.stdout is not None
        try:
            assert driver.stdout.readline() == "connected\n"
            machines.add()
            assert driver.stdout.readline() == "8\n"
        finally:
            driver.kill()
