"""``train.py`` with engines that are started before it, by a plain ``sglang.launch_server``, and outlive it.

On every change: their address, key and weights, with stand-ins, in ``tests/unit/ray/test_external_engines.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.backends.sglang_utils.ports import reserve_ports
from tests.support.engines import Reference, output_log_probs
from tests.support.plain_engine import PlainEngine
from tests.support.run_train import Finished, Run, canary, read_metric, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

KEY = "a-key-of-others"
PROMPT = list(range(20, 60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[PlainEngine]]:
    folder = tmp_path_factory.mktemp("engines")
    made = [PlainEngine(checkpoint, folder / f"engine_{i}.log", KEY, plugin=i == 1) for i in range(2)]
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait_ready()
        yield made
    finally:
        for engine in made:
            engine.kill()


def flags_of(checkpoint: Path, folder: Path, engines: list[PlainEngine], words: str) -> list[str]:
    more = f"""--rollout-external-engine-addrs {" ".join(engine.address for engine in engines)} --sglang-api-key {KEY}
        --router-policy round_robin --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    return [*rl_flags(checkpoint, sums_file(folder / "sums.jsonl")), *more.split(), *words.split()]


def check(run: Finished, engines: list[PlainEngine], export: Path, version: str) -> None:
    """The engines run, were asked, and hold what the trainer has saved, not what they were started with."""
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert all(engine.is_running for engine in engines)
    assert [engine.client.weight_version() for engine in engines] == [version] * 2
    asked = [engine.log.read_text().count("POST /generate") for engine in engines]
    assert min(asked) > 0
    reference = Reference(export)
    for engine in engines:
        params = {"max_new_tokens": 16, "temperature": 0.0, "ignore_eos": True}
        reply = engine.client.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})
        expected = reference.log_probs(PROMPT, reply["output_ids"])
        assert (output_log_probs(reply) - expected).abs().max() < 1e-5
    held = engines[1].client.weights_checksum()
    engines[1].client.update_weights_from_disk(str(export), weight_version=version)
    assert engines[1].client.weights_checksum() == held


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_external_engines_load_the_weights_and_keep_running(
    checkpoint: Path, engines: list[PlainEngine], tmp_path: Path, transport: str
):
    first = engines[1].client.weights_checksum()
    words = f"--num-rollout 2 --save {tmp_path}/save --save-hf {tmp_path}/hf/{{rollout_id}} --save-interval 2"
    if transport == "disk":
        words += f" --update-weight-transport disk --update-weight-disk-dir {tmp_path}/weights"
    run = run_train(flags_of(checkpoint, tmp_path, engines, words), tmp_path / "run")
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}
    for number, engine in enumerate(engines):
        assert re.search(rf"external engine {number}: http://{engine.address} \(SGLang .*tp 1", run.output)
    assert run.metric("perf/tokens_per_gpu_per_sec")
    check(run, engines, tmp_path / "hf" / "1", "3")
    assert engines[1].client.weights_checksum() != first
    assert KEY not in run.output


@pytest.mark.soak
def test_prefill_and_decode_engines_of_others(checkpoint: Path, tmp_path: Path):
    pytest.importorskip("nixl", reason="prefill and decode engines on a CPU need nixl, which make setup installs")
    words = ["--disaggregation-transfer-backend", "nixl", "--disaggregation-mode"]
    of_prefill = ["prefill", "--disaggregation-bootstrap-port", str(reserve_ports(1)[0])]
    made = [
        PlainEngine(checkpoint, tmp_path / f"{kind[0]}.log", KEY, *words, *kind, plugin=True)
        for kind in (of_prefill, ["decode"])
    ]
    try:
        for engine in made:
            engine.start()
        for engine in made:
            engine.wait_ready()
        run = run_train(flags_of(checkpoint, tmp_path, made, "--num-rollout 2"), tmp_path / "run")
        assert canary(run.output) <= 1e-5
        assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
        assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}
        assert [engine.client.weight_version() for engine in made] == ["3"] * 2
        assert all(engine.is_running for engine in made)
    finally:
        for engine in made:
            engine.kill()


@pytest.mark.soak
def test_one_that_is_killed_and_started_again_gets_weights_first(
    checkpoint: Path, engines: list[PlainEngine], tmp_path: Path
):
    words = "--num-rollout 100000 --use-fault-tolerance"
    with Run(flags_of(checkpoint, tmp_path, engines, words), tmp_path / "run") as run:
        run.wait_for(r"rollout 1 of ", 240)
        engines[1].kill()
        run.wait_for_log("rollout_manager", f"1 (http://{engines[1].address}) accepts no connections any more", 60)
        run.wait_for(r"rollout 3 of ", 240)
        engines[1].start()
        run.wait_for_log("rollout_manager", "external engine 1 answers again", 240)
        last = max(read_metric(run.run_dir, "rollout/raw_reward"))
        run.wait_for(rf"rollout {last + 3} of ", 240)
        serving = read_metric(run.run_dir, "rollout/engines/serving")
        assert serving[max(serving)] == 2
        assert 1 in serving.values()
        assert max(read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
        for engine in engines:
            engine.kill()
        run.wait_for_log("rollout_manager", f"0 (http://{engines[0].address}) accepts no connections any more", 60)
        for engine in engines:
            engine.start()
        last = max(read_metric(run.run_dir, "rollout/raw_reward"))
        run.wait_for(rf"rollout {last + 2} of ", 300)
        assert max(read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
