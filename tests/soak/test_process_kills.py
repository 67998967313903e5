"""Each kind of process of the serving side, killed at random moments of a real run; prints the time to recovery."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from slime.ray.engines.served_model import ROUTER_RESTARTS
from tests.integration.test_loop_engine_faults import engine_servers
from tests.support.plain_engine import PlainEngine
from tests.support.process_kills import DEADLINE_S, Kills, reached, serves_again
from tests.support.run_train import Run, command_line, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

KEY = "a-key-of-others"
KILLS = int(os.environ.get("SLIME_SOAK_KILLS", "20"))
FLAGS = """--num-rollout 100000 --use-fault-tolerance --custom-rm-path tests.support.rollout_hooks.{reward}
    --rollout-max-response-len 128 --save-debug-rollout-data {folder}/dump_{{rollout_id}}.pt"""


def flags_of(folder: Path, checkpoint: Path, words: str, reward: str = "parity_reward") -> list[str]:
    flags = rl_flags(checkpoint, sums_file(folder / "sums.jsonl"))
    return [*flags, *FLAGS.format(folder=folder, reward=reward).split(), *words.split()]


def pid_of(run: Run, kind: str, judge: Path) -> int:
    """The process to kill."""
    if kind == "router":
        log = (run.run_dir / "logs" / "rollout_manager.log").read_text()
        return int(re.findall(r"router: \w+, pid (\d+), http", log)[-1])
    signs = {"prefill": "--disaggregation-mode=prefill", "decode": "--disaggregation-mode=decode", "judge": str(judge)}
    return next(pid for pid in engine_servers(run) if signs[kind] in command_line(pid))


@pytest.mark.timeout(600 + KILLS * 300)
@pytest.mark.parametrize("kind", ["prefill", "decode", "judge", "router"])
def test_a_process_that_the_run_has_started(tmp_path: Path, kind: str):
    pytest.importorskip("nixl", reason="prefill and decode engines on a CPU need nixl, which make setup installs")
    judge = make_tiny_checkpoint(tmp_path / "judge", seed=7, num_hidden_layers=1)
    engines = tmp_path / "engines.yaml"
    engines.write_text(f"""
sglang:
  - name: actor
    server_groups: [{{worker_type: prefill, num_gpus: 1}}, {{worker_type: decode, num_gpus: 2}}]
  - {{name: judge, model_path: {judge}, server_groups: [{{num_gpus: 1}}]}}
""")
    words = f"--sglang-config {engines} --rollout-num-gpus 4"
    flags = flags_of(tmp_path, make_tiny_checkpoint(tmp_path / "model"), words, "judged_reward")
    with Run(flags, tmp_path / "run") as run:
        run.wait_for(r"rollout 0 of ", DEADLINE_S)

        def recovered(kills: int) -> bool:
            if kind == "router":
                return reached(run, "rollout/engines/router_restarts", kills) is not None
            model, count = ("judge", 1) if kind == "judge" else ("actor", 3)
            name = f"rollout/engines/{model}"
            return serves_again(run, f"{name}/lost", kills, f"{name}/serving", count)

        kills = Kills(run, tmp_path, lambda: os.kill(pid_of(run, kind, judge), signal.SIGKILL), recovered)
        print(f"{kind}: {kills.repeat(min(KILLS, ROUTER_RESTARTS), seed=len(kind))}")


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

        names = ("rollout/engines/lost", "rollout/engines/serving")
        kills = Kills(run, tmp_path, kill, lambda number: serves_again(run, names[0], number, names[1], 2))
        print(f"external engine: {kills.repeat(KILLS, seed=3)}")
