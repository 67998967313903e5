"""A prefill engine and two decode engines, some of which die, against a regular engine and transformers."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.errors import EngineStartError
from slime.backends.sglang_utils.router import RouterProcess
from slime.backends.sglang_utils.server_args import EngineSpec, check_transport
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.requests.engines import EngineLoads
from slime.rollout.sglang_rollout import generate
from slime.servers import http_utils
from slime.servers.engine_client import EngineClient
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from slime.weight_sync import steps
from slime.weight_sync.fanout import FanOut
from tests.integration.test_loop_engine_faults import engine_servers, wait_for_metric, wait_for_rollout
from tests.integration.test_moe_engine import LAYERS, TOPK, choices, make_checkpoint
from tests.support.arguments import run_args
from tests.support.engines import Reference, engine_args, output_log_probs
from tests.support.rollout_args import rollout_args
from tests.support.run_train import Run, command_line, read_metric, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]
TOLERANCE = 1e-5


@dataclass
class Served:
    """The engines of one model, the router, a regular engine beside them, and checkpoints of one architecture."""

    root: Path
    transport: str
    checkpoints: list[Path]
    prefill: EngineProcess
    decode: list[EngineProcess]
    regular: EngineProcess
    router: RouterProcess

    def push(self, version: int) -> None:
        """As a trainer does: version 1 is the first checkpoint, 2 the second, 3 the first again."""
        control = FanOut([engine.client(60) for engine in (self.prefill, *self.decode)])
        path = str(self.checkpoints[(version - 1) % 2])
        steps.pause_and_flush(control, "abort", 60)
        control.call("load", lambda c: c.update_weights_from_disk(path, weight_version=str(version)), 60)
        steps.verify_and_continue(control, version, 60)
        control.close()


def engine_of(root: Path, checkpoint: Path, rank: int, worker_type: str, transport: str) -> EngineProcess:
    args = engine_args(checkpoint, sglang_disaggregation_transfer_backend=transport)
    log = root / f"{worker_type}_{rank}.log"
    engine = EngineProcess(args, rank=rank, host="127.0.0.1", log_path=log, worker_type=worker_type)
    engine.start()
    return engine


def need(transport: str) -> None:
    """Skip the test where this machine lacks what carries caches with ``transport``."""
    spec = EngineSpec(rank=0, host="", port=0, nccl_port=0, num_gpus=1, model_path="", worker_type="decode")
    try:
        check_transport(engine_args("none", sglang_disaggregation_transfer_backend=transport), spec)
    except EngineStartError as e:
        pytest.skip(str(e))


FAILS_ONCE = """
import os
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def fail_when_asked(send, *args, **kwargs):
    try:
        os.remove("{asked}")
    except FileNotFoundError:
        return send(*args, **kwargs)
    return -1

def register():
    HookRegistry.register(
        "sglang.srt.disaggregation.mooncake.conn.MooncakeKVManager.send_kvcache", fail_when_asked, HookType.AROUND
    )
"""


def make_plugin(root: Path) -> Path:
    """Make a plug-in of SGLang in a directory, and return that: a file ``fail`` there lets one transfer fail."""
    path, about = root / "plugin", root / "plugin" / "fails_once-1.0.dist-info"
    about.mkdir(parents=True)
    (path / "fails_once.py").write_text(FAILS_ONCE.format(asked=path / "fail"))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fails-once\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[sglang.srt.plugins]\nfails_once = fails_once:register\n")
    return path


@pytest.fixture(scope="module", params=["nixl", "mooncake", "mooncake_tcp"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    need(request.param)
    root = tmp_path_factory.mktemp("disaggregated")
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "nixl":
            patch.setenv("PYTHONPATH", str(make_plugin(root)), prepend=os.pathsep)
        yield from serve(root, request.param)


def serve(root: Path, transport: str) -> Iterator[Served]:
    checkpoints = [make_tiny_checkpoint(root / f"model{seed}", seed=seed) for seed in (0, 1)]
    router = RouterProcess(
        engine_args(checkpoints[0]), "127.0.0.1", log_path=root / "router.log", pd_disaggregation=True
    )
    engines: list[EngineProcess] = []
    made = None
    try:
        router.start()
        for rank, worker_type in enumerate(("prefill", "decode", "decode", "regular")):
            engines.append(engine_of(root, checkpoints[0], rank, worker_type, transport))
        router.wait_ready()
        for engine in engines:
            engine.wait_ready()
        for engine in engines[:3]:
            router.add_engine(engine.info)
        made = Served(root, transport, checkpoints, engines[0], engines[1:3], engines[3], router)
        yield made
    finally:
        router.stop()
        for engine in {*engines, *((made.prefill, *made.decode) if made else ())}:
            engine.stop()


@pytest.fixture
def args(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    made = rollout_args(
        hf_checkpoint=str(served.checkpoints[0]), sglang_router_port=served.router.port, rollout_num_engines=2,
        rollout_request_timeout=60.0,
    )  # fmt: skip
    http_utils.init_http_client(made)
    yield made
    run(http_utils._http_client.close())  # type: ignore[attr-defined]
    SingletonMeta.clear_instances()


def prompts(count: int) -> list[list[int]]:
    """Some have a common beginning."""
    draw = random.Random(0)
    family = [draw.randrange(200) for _ in range(60)]
    return [family[: draw.randrange(60)] + [draw.randrange(200) for _ in range(1 + i % 7)] for i in range(count)]


def ask(url: str, prompt: list[int], tokens: int, **more: object) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, **more}
    return dict(EngineClient(url, timeout=60).generate(body))


def busy(served: Served) -> int:
    return sum(engine.client(10).num_requests() for engine in served.decode if engine.poll() is None)


def wait_for(condition: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begin(args: SimpleNamespace, count: int, tokens: int) -> tuple[list[Sample], threading.Thread]:
    """Generate ``count`` samples as a rollout does, in a thread."""
    samples = [Sample(index=i, prompt="", tokens=list(prompt)) for i, prompt in enumerate(prompts(count))]
    params = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}

    async def generate_all() -> None:
        await gather_or_cancel([generate(args, sample, dict(params)) for sample in samples])

    thread = threading.Thread(target=run, args=(generate_all(),))
    thread.start()
    return samples, thread


def check_log_probs(served: Served, samples: list[Sample]) -> int:
    """Every token has the log-prob that the weights of its version give it; return how many samples saw a push."""
    references = [Reference(checkpoint) for checkpoint in served.checkpoints]
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        prompt, output = sample.tokens[:cut], sample.tokens[cut:]
        assert sum(span["end"] - span["start"] for span in sample.weight_version_spans) == len(output)
        for span in sample.weight_version_spans:
            expected = references[(int(span["version"]) - 1) % 2].log_probs(prompt, output)
            part = slice(span["start"], span["end"])
            found = sample.rollout_log_probs or []
            assert max(abs(a - b) for a, b in zip(found[part], expected[part].tolist(), strict=True)) < TOLERANCE
    return sum(len(sample.weight_version_spans) > 1 for sample in samples)


def test_the_same_tokens_and_log_probs_as_a_regular_engine(served: Served, args: SimpleNamespace) -> None:
    work = [(prompt, (1, 7, 40)[i % 3]) for i, prompt in enumerate(prompts(24))]
    with ThreadPoolExecutor(24) as pool:
        found = list(pool.map(lambda item: ask(served.router.url, *item), work))
        expected = list(pool.map(lambda item: ask(served.regular.info.url, *item), work))
    for one, other in zip(found, expected, strict=True):
        assert one["output_ids"] == other["output_ids"]
        assert (output_log_probs(one) - output_log_probs(other)).abs().max() < TOLERANCE
    assert all((served.root / f"decode_{rank}.log").read_text().count("POST /generate") > 3 for rank in (1, 2))
    loads = EngineLoads(lambda: served.router.url, planned=2)
    assert len(run(loads.read())) == 2  # only those that decode
    assert loads.listed == 2


def test_every_token_has_the_version_of_its_weights(served: Served, args: SimpleNamespace) -> None:
    served.push(1)
    samples, thread = begin(args, 12, 200)
    for version in (2, 3):
        wait_for(lambda: busy(served) >= 6)
        time.sleep(0.3)
        served.push(version)
    thread.join(60)
    assert not thread.is_alive()
    assert [sample.response_length for sample in samples] == [200] * 12
    assert check_log_probs(served, samples) > 0


def test_a_transfer_that_failed_was_not_the_last_one_to_its_engine(served: Served, args: SimpleNamespace) -> None:
    """Mooncake gives an engine up to which one has failed, until a probe reaches it."""
    if served.transport == "nixl":
        pytest.skip("nixl gives no engine up")
    log = served.root / "prefill_0.log"
    (served.root / "plugin" / "fail").touch()
    samples, thread = begin(args, 12, 20)
    thread.join(120)
    assert not thread.is_alive()
    assert [sample.response_length for sample in samples] == [20] * 12
    assert len(re.findall(r"Session \S+ failed\.", log.read_text())) == 1
    wait_for(lambda: re.search(r"Session \S+ recovered via probe", log.read_text()), 120)
    before = [(served.root / f"decode_{rank}.log").read_text().count("POST /generate") for rank in (1, 2)]
    samples, thread = begin(args, 12, 20)
    thread.join(120)
    assert [sample.response_length for sample in samples] == [20] * 12
    after = [(served.root / f"decode_{rank}.log").read_text().count("POST /generate") for rank in (1, 2)]
    assert all(more > fewer for more, fewer in zip(after, before, strict=True))


def test_engines_that_die_are_done_without_and_replaced(served: Served, args: SimpleNamespace) -> None:
    """A decode engine with requests in flight, then the prefill engine; its successor has another bootstrap port."""
    served.push(3)
    samples, thread = begin(args, 12, 150)
    wait_for(lambda: busy(served) >= 6)
    lost = served.decode.pop()
    os.kill(lost.pid or 0, signal.SIGKILL)
    served.router.remove_engine(lost.info)
    thread.join(60)
    assert not thread.is_alive()
    assert [sample.response_length for sample in samples] == [150] * 12
    assert check_log_probs(served, samples) == 0

    os.kill(served.prefill.pid or 0, signal.SIGKILL)
    served.router.remove_engine(served.prefill.info)
    samples, thread = begin(args, 4, 20)
    successor = engine_of(served.root, served.checkpoints[0], 4, "prefill", served.transport)
    assert successor.info.bootstrap_port != served.prefill.info.bootstrap_port
    served.prefill = successor
    successor.wait_ready()
    successor.client().update_weights_from_disk(str(served.checkpoints[0]), weight_version="3")
    served.router.add_engine(successor.info)
    thread.join(60)
    assert not thread.is_alive()
    assert [sample.response_length for sample in samples] == [20] * 4
    assert check_log_probs(served, samples) == 0


def test_experts_of_prompts_come_with_their_caches(tmp_path: Path) -> None:
    """Answers of one token end in the prefill engine; the decode engine's cache is too small, so that it retracts."""
    need("nixl")
    checkpoint = make_checkpoint(tmp_path / "model")
    reference = Reference(checkpoint)
    common = {
        "use_rollout_routing_replay": True, "sglang_disaggregation_transfer_backend": "nixl",
        "sglang_num_reserved_decode_tokens": 4, "sglang_chunked_prefill_size": 32,
    }  # fmt: skip
    router = RouterProcess(
        engine_args(checkpoint), "127.0.0.1", log_path=tmp_path / "router.log", pd_disaggregation=True
    )
    engines = [
        EngineProcess(
            engine_args(checkpoint, sglang_max_total_tokens=tokens, **common),
            rank=rank, host="127.0.0.1", log_path=tmp_path / f"{kind}.log", worker_type=kind,
        )
        for rank, (kind, tokens) in enumerate((("prefill", 4000), ("decode", 700)))
    ]  # fmt: skip
    try:
        router.start()
        for engine in engines:
            engine.start()
        router.wait_ready()
        for engine in engines:
            engine.wait_ready()
            router.add_engine(engine.info)
        work = [(prompt, (1, 20, 100)[i % 3]) for i, prompt in enumerate(prompts(18))]
        with ThreadPoolExecutor(18) as pool:
            replies = list(pool.map(lambda item: ask(router.url, *item, return_routed_experts=True), work))
    finally:
        router.stop()
        for engine in engines:
            engine.stop()
    args = run_args(num_layers=LAYERS, moe_router_topk=TOPK)
    for (prompt, count), reply in zip(work, replies, strict=True):
        sample = Sample(prompt="", tokens=list(prompt))
        output, log_probs = reply["output_ids"], output_log_probs(reply).tolist()
        sample.append_response_tokens(args, tokens=output, log_probs=log_probs, meta_info=reply["meta_info"])
        assert len(output) == count
        assert torch.equal(sample.rollout_routed_experts.long().sort().values, choices(reference, sample.tokens))
    assert "retract" in (tmp_path / "decode.log").read_text().lower()


@pytest.mark.timeout(900)
def test_grpo_over_prefill_and_decode_engines_that_die(tmp_path: Path):
    need("nixl")
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    extra = """--prefill-num-servers 1 --rollout-num-gpus 3 --num-rollout 100000 --rollout-max-response-len 64
        --use-fault-tolerance --check-weight-update-equal --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    with Run([*flags, *extra.split()], tmp_path / "run") as run:
        wait_for_rollout(run, 3)
        for lost, kind in enumerate(("decode", "prefill"), start=1):
            pid = next(pid for pid in engine_servers(run) if f"--disaggregation-mode={kind}" in command_line(pid))
            os.kill(pid, signal.SIGKILL)
            back = wait_for_metric(run, "rollout/engines/restarted", lost)
            wait_for_rollout(run, back + 2)
    assert max(read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    oldest = read_metric(run.run_dir, "rollout/weight_version/min")
    assert all(version >= step + 1 for step, version in oldest.items())
    assert max(read_metric(run.run_dir, "rollout/engines/lost").values()) == 2


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_prefill_and_decode_engines_take_turns_with_the_trainer(tmp_path: Path, transport: str):
    """Their memory is released and resumed around every training step."""
    need(transport)
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--colocate --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --prefill-num-servers 1 --num-rollout 3
        --sglang-disaggregation-transfer-backend {transport} --check-weight-update-equal --use-fault-tolerance
        --rollout-max-response-len 64 --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert set(run.metric("rollout/engines/lost").values()) == {0}
