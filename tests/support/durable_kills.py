"""Kill the run of ``durable_driver`` again and again until it is through, and count what it trained on.

What is right is decided without the code under test: prompts come in the documented order, stand-in engines give every
prompt the same answer token by token, and the run's trainer and its log hook write down what they saw.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.durable_driver import TRACKER, drops, fans_out, read_model
from tests.support.durable_points import WHILE_RUNNING, WHILE_STARTING
from tests.support.rollout_args import write_prompts
from tests.support.standin import StandInCluster

PROMPTS, BATCH, COPIES, SEED = 10, 4, 2, 42
FIRST_TOKEN = 1000
LAST_STEPS = 6
POINT_PATIENCE_S = 10.0
"""So long after the first request a run that has not come to its point is killed: not every plan's points come up."""
FULLY_ASYNC = {
    "overlap": True,
    "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
    "sglang_server_concurrency": 6,
}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rollout": True, "save_interval": 1},
    "overlap": {"overlap": True, "partial_rollout": True},
    "filter": {"dynamic_sampling_filter_path": "tests.support.durable_driver.keep"},
    "fully async": FULLY_ASYNC,
    "fan-out": {"custom_generate_function_path": "tests.support.durable_driver.fan_out", "save_interval": 1},
    "fully async fan-out": {**FULLY_ASYNC, "custom_generate_function_path": "tests.support.durable_driver.fan_out"},
    "no buffer, carried over": {
        "data_source_path": "slime.rollout.data_source.RolloutDataSource", "global_batch_size": 6, "save_interval": 1
    },
}  # fmt: skip


Point = tuple[str, int]
"""A name in ``durable_points``, and the how manyth time there."""
Plan = list[Point | None]
TORN = "half of a record is written"


def random_plan(seed: int, kills: int) -> Plan:
    """Return where ``kills`` starts are killed: at a point, at one of the start after that, and twice at any moment.

    The first one comes after a rollout that no checkpoint has, so that there is something to recover on any machine.
    """
    rng = random.Random(seed)
    running, starting = (rng.sample(sorted(points), len(points)) for points in (WHILE_RUNNING, WHILE_STARTING))
    plan: Plan = []
    while len(plan) < kills + 4:
        turn = len(plan) // 4
        start = starting[turn % len(starting)]
        nth = rng.choice((1, 1, 2, 3))
        plan += [(TORN, 1) if "torn" in start else (running[turn % len(running)], nth), (start, 1), None, None]
    first = rng.randrange(4)
    return [("the rollout is over", 1), *plan[first : first + kills - 1]]


def every_point() -> Plan:
    """Return all points, those of the start after others; an end that is to be cut off has to be incomplete before."""
    plan: Plan = [(point, 1) for point in WHILE_RUNNING]
    for number, point in enumerate(WHILE_STARTING):
        plan[2 * number + 1 : 2 * number + 1] = [(TORN, 1), (point, 1)] if "torn" in point else [(point, 1)]
    return plan


@dataclass
class Kills:
    """Events of a series of kills: the moments, restored groups, and samples that continued from a part."""

    moments: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    continued: int = 0


def whole_reply(prompt: list[int]) -> list[int]:
    """The answer to a prompt: 5 to 16 tokens."""
    digest = hashlib.sha256(json.dumps(prompt).encode()).digest()
    return [FIRST_TOKEN + 10 * digest[i] + i for i in range(5 + digest[31] % 12)]


def reply(ids: list[int], params: dict[str, Any]) -> list[int]:
    """The rest of the answer for who has its beginning already."""
    prompt = [token for token in ids if token < FIRST_TOKEN]
    have = ids[len(prompt) :]
    whole = whole_reply(prompt)
    assert whole[: len(have)] == have
    return whole[len(have) :]


def run_with_kills(
    folder: Path, plan: Plan, seed: int, mode: str, *, patience_s: float = POINT_PATIENCE_S, **changes: Any
) -> Kills:
    """Kill the same run at every point of ``plan``, or at a random moment where that says None; see ``check``."""
    rng = random.Random(seed)
    folder.mkdir(parents=True)
    prompts = write_prompts(folder / "prompts.jsonl", PROMPTS)
    found = Kills()
    with StandInCluster(2) as cluster:
        for engine in cluster.engines:
            engine.reply = reply
            engine.delay = lambda ids: 0.002 + 0.01 * (ids[1] % 5 == 0)  # some are slow: over-sampling cancels them
        flags = {
            "prompt_data": str(prompts), "save": str(folder / "save"), "load": str(folder / "save"),
            "save_interval": 2, "num_rollout": 100_000, "rollout_batch_size": BATCH, "over_sampling_batch_size": 6,
            "n_samples_per_prompt": COPIES, "global_batch_size": BATCH * COPIES, "sglang_router_ip": cluster.host,
            "sglang_router_port": cluster.port, "run_dir": str(folder / "run"), "test_folder": str(folder),
            "overlap": False, "rollout_shuffle": True, "rollout_seed": SEED, "rollout_max_response_len": 32,
            **MODES[mode], **changes,
        }  # fmt: skip
        starts: list[tuple[int, int]] = []
        for number, kill in enumerate(plan):
            starts.append((tracker(folder), len(lines(folder / "trained.jsonl"))))
            log = folder / f"log{number}.txt"
            patience = rng.choice((rng.uniform(0.0, 0.8), -rng.uniform(0.2, 2.0))) if kill is None else patience_s
            found.moments[_kill_once(cluster, flags, log, number, kill, patience)] += 1
        steps = tracker(folder) + 1
        for number, more in ((len(plan), {}), (len(plan) + 1, {"over_sampling_batch_size": BATCH})):
            steps += LAST_STEPS
            starts.append((tracker(folder), len(lines(folder / "trained.jsonl"))))
            _run_to_the_end(cluster, flags | more | {"num_rollout": steps}, folder / f"log{number}.txt", number)
    check(folder, starts, steps, mode, flags["global_batch_size"])
    found.resumed = sum(start["groups"] for start in lines(folder / "resumed.jsonl"))
    found.continued = sum(len({span[0] for span in s["spans"]}) > 1 for s in lines(folder / "samples.jsonl"))
    return found


def _start(cluster: StandInCluster, flags: dict[str, Any], log: Path, number: int) -> subprocess.Popen[bytes]:
    for engine in cluster.engines:
        engine.requests.clear()
        engine.weight_version = str(number)
    with open(log, "w") as file:
        command = [sys.executable, "-m", "tests.support.durable_driver", json.dumps(flags)]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)


def _kill_once(
    cluster: StandInCluster, flags: dict[str, Any], log: Path, number: int, kill: Point | None, patience_s: float
) -> str:
    """Start the run and kill it ``patience_s`` after its first request, or, when negative, so long after its launch.

    Return when that was. A point that it does not come to is a random moment after all.
    """
    run = _start(cluster, flags | {"kill_at": kill}, log, number)
    try:
        if patience_s < 0:  # while it starts, or just after that
            what, end = "while it starts", time.monotonic() - patience_s
        else:
            what, end = "a random moment", _wait_until_generating(cluster, run, log) + patience_s
        while time.monotonic() < end and run.poll() is None:
            time.sleep(0.002)
        died = run.poll() is not None
        _end(run)
        assert run.returncode == -signal.SIGKILL, f"it ended by itself ({run.returncode}): {log.read_text()[-3000:]}"
        return kill[0] if died and kill is not None else what
    finally:
        _end(run)


def _run_to_the_end(cluster: StandInCluster, flags: dict[str, Any], log: Path, number: int) -> None:
    run = _start(cluster, flags, log, number)
    try:
        run.wait(300)
    finally:
        _end(run)
    assert run.returncode == 0, log.read_text()[-3000:]


def _end(run: subprocess.Popen[bytes]) -> None:
    if run.poll() is None:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(20)


def _wait_until_generating(cluster: StandInCluster, run: subprocess.Popen[bytes], log: Path) -> float:
    """Return the time at which the first request came, or the run was killed."""
    end = time.monotonic() + 120
    while not cluster.requests and run.poll() is None:
        assert time.monotonic() < end, f"nothing generated: {log.read_text()[-3000:]}"
        time.sleep(0.005)
    return time.monotonic()


# What is right


def tracker(folder: Path) -> int:
    """Return the last whole checkpoint, -1 before the first."""
    path = folder / "save" / TRACKER
    return int(path.read_text()) if path.exists() else -1


def lines(path: Path) -> list[Any]:
    """Return the records of a log."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(folder: Path, starts: list[tuple[int, int]], steps: int, mode: str, step_samples: int) -> None:
    """Lost 0, trained twice 0, and every sample is what it would be if nothing had been killed."""
    final = _lineage(lines(folder / "trained.jsonl"), starts)
    assert final == read_model(str(folder / "save"), steps - 1)  # what the last checkpoint was trained on
    assert len(final) == steps
    assert "fan-out" in mode or all(len(step) % step_samples == 0 for step in final)
    trained = Counter(index for step in final for index in step)
    state = json.loads((folder / "save" / "rollout" / f"global_dataset_state_dict_{steps - 1}.json").read_text())
    waiting = Counter(_indices([*state.get("in_flight", []), *state["buffer"]]))
    carried = folder / "save" / "rollout" / f"carried_over_{steps - 1}.json"
    if carried.exists():
        waiting += Counter(s["index"] for s in json.loads(carried.read_text())["samples"])
    fan_out = "fan-out" in mode
    for group in range(state["sample_group_index"]):
        for index in range(COPIES * group, COPIES * (group + 1)):
            expected = 0 if mode == "filter" and drops(group) else 1
            copies = 2 if fan_out and fans_out(group) else 1
            seen = (trained[index], waiting[index])
            allowed = [(copies * expected, 0)] + [(0, n) for n in (1, copies) if waiting[index] == n]
            assert seen in allowed, f"sample {index} of group {group}: {seen[0]} times trained, {seen[1]} waiting"
    last = max(trained) // COPIES
    waits = {index // COPIES for index in waiting}
    assert mode.startswith("fully async") or all(group > last - 5 * BATCH for group in waits), (sorted(waits), last)
    _check_samples(lines(folder / "samples.jsonl"), set(trained))


def _lineage(records: list[Any], starts: list[tuple[int, int]]) -> list[list[int]]:
    """Return what the final weights were trained on: each start continues from the checkpoint that it found."""
    final: list[list[int]] = []
    ends = [first for _, first in starts[1:]] + [len(records)]
    for (checkpoint, first), end in zip(starts, ends, strict=True):
        del final[checkpoint + 1 :]
        assert len(final) == checkpoint + 1
        for record in records[first:end]:
            assert record["rollout"] == len(final)
            final.append(record["samples"])
    return final


def _indices(groups: Any) -> list[int]:
    if isinstance(groups, list):
        return [index for item in groups for index in _indices(item)]
    return [groups["index"]]


def _check_samples(samples: list[Any], trained: set[int]) -> None:
    """Prompts in the documented order, the engines' whole answers with their log-probs, a version for every token."""
    order: list[int] = []
    while len(order) * COPIES <= max(trained):
        epoch = list(range(PROMPTS))
        random.Random(SEED + len(order) // PROMPTS).shuffle(epoch)
        order += epoch
    assert trained <= {sample["index"] for sample in samples}
    for sample in samples:
        assert sample["group_index"] == sample["index"] // COPIES
        assert sample["prompt"] == f"p{order[sample['group_index']]}"
        prompt = [ord(c) for c in sample["prompt"]]
        answer = whole_reply(prompt)
        assert sample["tokens"] == prompt + answer, sample
        assert sample["rollout_log_probs"] == [-0.5 - token / 1000 for token in answer]
        assert sample["loss_mask"] == [1] * len(answer)
        covered = [position for _, start, end in sample["spans"] for position in range(start, end)]
        assert covered == list(range(len(answer))), sample
        versions = [int(version) for version, _, _ in sample["spans"]]
        assert versions == sorted(versions)
