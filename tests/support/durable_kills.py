"""Kill the run of ``durable_driver`` at random moments until it is through, and count what it trained on."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.durable_driver import read_model
from tests.support.fake_engine import FakeCluster
from tests.support.rollout_args import write_prompts

FULLY_ASYNC = {
    "overlap": True,
    "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
}


def run_with_kills(folder: Path, kills: int, seed: int, **changes: Any) -> int:
    """Kill the same run ``kills`` times at random moments after its start; assert that nothing is lost or repeated.

    Returns how many groups came back from the journal, all restarts together.
    """
    rng = random.Random(seed)
    steps, batch = 8 + kills, 4
    folder.mkdir(parents=True)
    prompts = write_prompts(folder / "prompts.jsonl", 10)
    back = 0
    with FakeCluster(2) as cluster:
        for engine in cluster.engines:
            engine.delay = lambda ids: 0.004 + 0.02 * (ids[-1] % 5 == 0)  # some are slow: over-sampling cancels them
        flags = {
            "prompt_data": str(prompts), "save": str(folder / "save"), "load": str(folder / "save"),
            "save_interval": 2, "num_rollout": steps, "rollout_batch_size": batch, "over_sampling_batch_size": 6,
            "n_samples_per_prompt": 2, "global_batch_size": 8, "sglang_router_ip": cluster.host,
            "sglang_router_port": cluster.port, "run_dir": str(folder / "run"), "overlap": False, **changes,
        }  # fmt: skip
        for number in range(kills + 1):
            log = folder / f"log{number}.txt"
            with open(log, "w") as file:
                command = [sys.executable, "-m", "tests.support.durable_driver", json.dumps(flags)]
                run = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                if number < kills:
                    wait_until_generating(cluster, run, log)
                    time.sleep(rng.uniform(0.0, 0.8))
                    run.kill()
                run.wait(120)
            finally:
                run.kill()
                run.wait(10)
            for engine in cluster.engines:
                engine.requests.clear()
        assert run.returncode == 0, log.read_text()[-3000:]
        back = sum(_came_back(path) for path in folder.glob("log*.txt"))
    check(folder / "save", steps, batch)
    return back


def wait_until_generating(cluster: FakeCluster, run: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 120
    while not cluster.requests and run.poll() is None:
        assert time.monotonic() < end, f"nothing generated: {log.read_text()[-3000:]}"
        time.sleep(0.01)


def check(save: Path, steps: int, batch: int) -> None:
    """Every group drawn was trained on once, or is in the last state: in the buffer, or still worked on."""
    trained = read_model(str(save), steps - 1)
    assert [len(step) for step in trained] == [batch] * steps
    state = json.loads((save / "rollout" / f"global_dataset_state_dict_{steps - 1}.json").read_text())
    waiting = [group[0]["group_index"] for group in [*state.get("in_flight", []), *state["buffer"]]]
    everything = [group for step in trained for group in step] + waiting
    assert sorted(everything) == list(range(state["sample_group_index"])), (trained, waiting)


def _came_back(log: Path) -> int:
    lines = [line for line in log.read_text().splitlines() if "groups generated before the restart come back" in line]
    return sum(int(line.split(" groups generated")[0].rpartition(" ")[2].rpartition(":")[2]) for line in lines)
