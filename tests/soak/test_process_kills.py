"""Each kind of process of the serving side, and a node, lost at random moments of real runs: times to recovery."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.ray.manager.engines.served_model import ROUTER_RESTARTS
from tests.integration.test_loop_engine_faults import engine_servers
from tests.support.machines import HEAD, Machines
from tests.support.plain_engine import PlainEngine
from tests.support.process_kills import DEADLINE_S, Kills, Kind
from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

KEY = "a-key-of-others"
KILLS = int(os.environ.get("SLIME_SOAK_KILLS", "20"))
NODES = max(2, KILLS // 4)
"""Each takes more than a minute until it is noticed."""
FLAGS = """--num-rollout 100000 --use-fault-tolerance --custom-rm-path tests.support.rollout_hooks.{reward}
    --rollout-max-response-len 128 --save-debug-rollout-data {folder}/dump_{{rollout_id}}.pt"""


def flags_of(folder: Path, checkpoint: Path, words: str, reward: str = "parity_reward") -> list[str]:
    flags = rl_flags(checkpoint, sums_file(folder / "sums.jsonl"))
    return [*flags, *FLAGS.format(folder=folder, reward=reward).split(), *words.split()]


def kill_of(run: Run, is_it: Callable[[str], bool]) -> Callable[[], None]:
    """Return what kills the first engine whose command line is one."""
    return lambda: os.kill(next(pid for pid in engine_servers(run) if is_it(command_line(pid))), signal.SIGKILL)


def router(run: Run) -> tuple[int, str]:
    """Return the process and the host of the first model's router."""
    log = (run.run_dir / "logs" / "rollout_manager.log").read_text()
    pid, host = re.findall(r"router: \w+, pid (\d+), http://([^:]+):", log)[-1]
    return int(pid), host


def of_model(name: str, count: int) -> dict[str, str | int]:
    """Return the metrics of a model's engines: the number lost, and the number that serves."""
    return {"counter": f"rollout/engines/{name}/lost", "serving": f"rollout/engines/{name}/serving", "count": count}


REGULAR = "[{num_gpus: 2}]"
DISAGGREGATED = "[{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 2}]"


@pytest.mark.timeout(600 + KILLS * 300)
@pytest.mark.parametrize("deployment", ["regular", "disaggregated"])
def test_processes_that_the_run_has_started(tmp_path: Path, deployment: str):
    """Of a model that is trained and of a frozen one, and the first one's router."""
    if deployment == "disaggregated":
        pytest.importorskip("nixl", reason="prefill and decode engines on a CPU need nixl, which make setup installs")
    judge = make_tiny_checkpoint(tmp_path / "judge", seed=7, num_hidden_layers=1)
    engines = tmp_path / "engines.yaml"
    engines.write_text(f"""
sglang:
  - {{name: actor, server_groups: {REGULAR if deployment == "regular" else DISAGGREGATED}}}
  - {{name: judge, model_path: {judge}, server_groups: [{{num_gpus: 1}}]}}
""")
    words = f"--sglang-config {engines} --rollout-num-gpus {3 if deployment == 'regular' else 4}"
    flags = flags_of(tmp_path, make_tiny_checkpoint(tmp_path / "model"), words, "judged_reward")
    with Run(flags, tmp_path / "run") as run:
        run.wait_for(r"rollout 0 of ", DEADLINE_S)
        if deployment == "regular":
            kinds = [
                Kind("regular engine", kill_of(run, lambda line: str(judge) not in line), **of_model("actor", 2)),
                Kind("frozen engine", kill_of(run, lambda line: str(judge) in line), **of_model("judge", 1)),
                Kind("router", lambda: os.kill(router(run)[0], signal.SIGKILL), "rollout/engines/router_restarts"),
            ]
        else:
            kinds = [
                Kind(
                    f"{kind} engine",
                    kill_of(run, lambda line, kind=kind: f"--disaggregation-mode={kind}" in line),  # type: ignore[misc]
                    **of_model("actor", 3),
                )
                for kind in ("prefill", "decode")
            ]
        print(Kills(run, tmp_path).repeat(kinds, min(KILLS, ROUTER_RESTARTS), seed=3))


@pytest.mark.timeout(600 + KILLS * 300)
def test_an_engine_that_others_have_started(tmp_path: Path):
    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    engines = [PlainEngine(checkpoint, tmp_path / f"engine_{i}.log", KEY, plugin=True) for i in range(2)]
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.callback(engine.kill)
            engine.start()
        for engine in engines:
            engine.wait_ready()
        addresses = " ".join(engine.address for engine in engines)
        flags = flags_of(tmp_path, checkpoint, f"--rollout-external-engine-addrs {addresses} --sglang-api-key {KEY}")
        run = stack.enter_context(Run(flags, tmp_path / "run"))
        run.wait_for(r"rollout 0 of ", DEADLINE_S)

        def kill() -> None:
            engines[1].kill()
            engines[1].start()  # as others would

        kind = Kind("external engine", kill, "rollout/engines/lost", "rollout/engines/serving", 2)
        print(Kills(run, tmp_path).repeat([kind], KILLS, seed=3))


@pytest.mark.timeout(600 + KILLS * 300)
def test_a_node_that_is_switched_off(tmp_path: Path):
    """The run continues with the engine on the other node, and gets one on a node that takes its place."""
    words = "--rollout-num-gpus 2 --weight-sync-timeout 60"  # nothing else ends a push to a host that is silent
    flags = flags_of(tmp_path, make_tiny_checkpoint(tmp_path / "model"), words)
    with contextlib.ExitStack() as stack:
        # Ray's sockets live under its directory, and their paths must be short.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
        machines = stack.enter_context(Machines(Path(root), head_slots=2, slots=1))
        last = [machines.add()]
        run = stack.enter_context(Run(flags, tmp_path / "run", env=machines.joining))
        run.wait_for(r"rollout 0 of ", DEADLINE_S)
        assert router(run)[1] == HEAD  # and so is the rollout manager, which has started it

        def is_lost() -> None:
            gone = last[0].address
            last[0].switch_off()
            # Ray says so, or before that a push of weights finds no engine at the address.
            address = re.escape(gone)
            lost = rf"engine 1(: its node {address} is gone| \(http://{address}:\d+\): it does not respond any more)"
            run.wait_for(lost, DEADLINE_S)
            run.wait_for(r"engine 1: a node of its slots is gone, and no other has room for them", DEADLINE_S)
            trained = max(read_metric(run.run_dir, "train/loss"))
            run.wait_for(rf"rollout {trained + 3} of ", DEADLINE_S)
            assert read_metric(run.run_dir, "rollout/engines/serving")[trained + 3] == 1
            last[0] = machines.add()

        def is_replaced() -> None:
            last[0].switch_off()
            last[0] = machines.add()

        counts = ("rollout/engines/lost", "rollout/engines/serving", 2)
        kills = Kills(run, tmp_path)
        kills.once(Kind("node, replaced after three rollouts", is_lost, *counts))
        print(kills.repeat([Kind("node", is_replaced, *counts)], NODES - 1, seed=3))
