"""The default rollout on a real engine behind a real router: partial rollouts, aborts, log-probs, keys."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func, teacher_log_probs
from slime.rollout.rm_hub import remote
from slime.rollout.sglang_rollout import generate_rollout
from slime.servers import http_utils
from slime.servers.loads import num_requests_from_load
from slime.utils.async_utils import interrupt, run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout_buffer_example
from tests.support.engines import Reference, engine_and_router, engine_args
from tests.support.rollout_args import rollout_args
from tests.support.rollout_buffers import ServedBuffer
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
KEY = "a-key-of-this-run"


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    root = tmp_path_factory.mktemp("default_rollout")
    checkpoint = make_tiny_checkpoint(root / "model")
    # smg would refuse the model name of the rollout buffer's generator.
    args = engine_args(checkpoint, sglang_api_key=KEY, sglang_router_package="sglang_router")
    with engine_and_router(args, root) as (engine, router):
        router.add_engine(engine.info)
        yield SimpleNamespace(
            root=root,
            checkpoint=checkpoint,
            port=router.port,
            client=engine.client(),
            reference=Reference(checkpoint),
        )


@pytest.fixture
def make_args(setup: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)

    def make(**overrides: Any) -> SimpleNamespace:
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"input": f"{i}+{i}=", "label": str(2 * i)}) + "\n" for i in range(20)))
        args = rollout_args(
            hf_checkpoint=str(setup.checkpoint), prompt_data=str(prompts), sglang_router_port=setup.port,
            rollout_num_engines=1, sglang_api_key=KEY, rollout_request_timeout=60.0, **overrides,
        )  # fmt: skip
        http_utils.init_http_client(args)
        return args

    yield make
    if http_utils._http_client is not None:
        run(http_utils._http_client.close())
    SingletonMeta.clear_instances()


def check_log_probs(setup: SimpleNamespace, samples: list[Sample]) -> None:
    """Assert that a sample's log-probs are those of transformers for its tokens, also where it was resumed."""
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        expected = setup.reference.log_probs(sample.tokens[:cut], sample.tokens[cut:])
        if sample.rollout_top_p_token_ids is not None:
            expected -= log_masses(setup, sample)
        assert torch.allclose(torch.tensor(sample.rollout_log_probs), expected, atol=1e-5)


def log_masses(setup: SimpleNamespace, sample: Sample) -> torch.Tensor:
    """Return log-probs of transformers for the whole top-p set of every response token, [response_length]."""
    with torch.no_grad():
        logits = setup.reference.model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
    table, ids = torch.log_softmax(logits.float(), dim=-1), sample.rollout_top_p_token_ids.long()
    masks = ids.tensor_split(sample.rollout_top_p_token_offsets[1:-1].long())
    return torch.stack([row[kept_ids].logsumexp(0) for row, kept_ids in zip(table, masks, strict=True)])


def requests_left(setup: SimpleNamespace) -> int:
    return num_requests_from_load(setup.client.loads())


def test_samples_hold_the_tokens_and_log_probs_of_the_engine(setup, make_args):
    args = make_args(rollout_max_response_len=24)
    samples = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert len(samples) == 8
    for sample in samples:
        assert sample.status in (Sample.Status.TRUNCATED, Sample.Status.COMPLETED)
        assert 0 < sample.response_length <= 24
        assert len(sample.rollout_log_probs) == sample.response_length == len(sample.loss_mask)
        assert len(sample.weight_versions) == 1
    check_log_probs(setup, samples)


STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


def test_streamed_samples_are_the_same(setup, make_args):
    args = make_args(rollout_max_response_len=24, rollout_temperature=0.0)
    whole = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    args.custom_generate_function_path = STREAMING
    streamed = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert [s.tokens for s in streamed] == [s.tokens for s in whole]
    for one, other in zip(streamed, whole, strict=True):
        assert (one.response, one.status, one.weight_versions) == (other.response, other.status, other.weight_versions)
        assert len(one.rollout_log_probs) == one.response_length == len(one.loss_mask)
        assert torch.allclose(torch.tensor(one.rollout_log_probs), torch.tensor(other.rollout_log_probs), atol=1e-5)
        names = [event["name"] for event in one.trace["events"]]
        assert "sglang_generate_stream" in names
        assert "sglang_generate" not in names


def test_a_teacher_tells_the_log_probs_of_the_responses(setup, make_args, monkeypatch):
    """The teacher is the student here: they agree."""
    client = http_utils.HttpClient(8, api_key=KEY)
    client.trust(f"http://127.0.0.1:{setup.port}")
    monkeypatch.setattr(remote, "_client", client)
    args = make_args(
        rollout_max_response_len=24,
        custom_rm_path="slime.rollout.on_policy_distillation.reward_func",
        rm_url=f"http://127.0.0.1:{setup.port}/generate",
    )
    samples = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert post_process_rewards(args, samples) == ([0.0] * 8, [0.0] * 8)
    for sample in samples:
        cut = len(sample.tokens) - sample.response_length
        expected = setup.reference.log_probs(sample.tokens[:cut], sample.tokens[cut:])
        assert torch.allclose(torch.tensor(sample.teacher_log_probs), expected, atol=1e-5)
        assert not sample.remove_sample
    last = setup.reference.model.config.vocab_size - 1  # the engine names it 0
    sample = Sample(tokens=[last, 5, last, 9, last], response_length=3, index=0)
    reported = teacher_log_probs(sample, run(reward_func(args, sample)))
    assert torch.allclose(torch.tensor(reported), setup.reference.log_probs([last, 5], [last, 9, last]), atol=1e-5)
    unknown = {"input_ids": [5], "return_logprob": True, "token_ids_logprob": [last + 1]}
    with pytest.raises(http_utils.HttpRequestError, match=rf"valid range is \[0, {last + 1}\)"):
        run(remote.ask(args.rm_url, unknown, 30.0))
    run(client.close())


def test_trajectories_of_the_rollout_buffer(setup, make_args, monkeypatch):
    """A generator of its own process asks the engine through the router, and fills the buffer with conversations."""
    monkeypatch.setattr(rollout_buffer_example, "_started", {})
    with ServedBuffer() as served:
        args = make_args(
            rollout_max_response_len=12, rollout_buffer_url=served.url, rollout_task_type="math",
            fetch_trajectory_retry_times=-1, loss_mask_type="qwen", num_epoch=None, num_rollout=2,
        )  # fmt: skip
        source = RolloutDataSourceWithBuffer(args)
        rollouts = [rollout_buffer_example.generate_rollout(args, number, source).samples for number in range(2)]
    groups = [group for groups in rollouts for group in groups]
    assert [len(group) for group in groups] == [2] * 8
    assert len({group[0].metadata["instance_id"] for group in groups}) == 8
    for sample in iter_samples(groups):
        assert sample.status in (Sample.Status.TRUNCATED, Sample.Status.COMPLETED)
        assert 0 < sample.response_length == len(sample.loss_mask) < len(sample.tokens)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("generate", [None, STREAMING], ids=["whole", "streamed"])
def test_an_over_sampled_partial_rollout_is_continued_later(setup, make_args, generate, top_p):
    # Ten stop tokens in 384: responses of about 40 tokens, rarely of the same length, so that some are in flight when
    # the first group is done.
    args = make_args(
        over_sampling_batch_size=8,
        partial_rollout=True,
        rollout_max_response_len=250,
        rollout_top_p=top_p,
        rollout_stop_token_ids=list(range(10)),
        custom_generate_function_path=generate,
        rm_type="random",  # there at once: all may be generated until busy worker processes answer
    )
    args.rollout_batch_size = 1
    source = RolloutDataSourceWithBuffer(args)
    first = generate_rollout(args, 0, source)
    assert requests_left(setup) == 0
    partial = [s for s in iter_samples(source.buffer) if s.status == Sample.Status.ABORTED and s.response_length]
    assert partial, "nothing was in flight when the first group was done"
    held = {s.index: list(s.tokens) for s in partial}
    args.rollout_batch_size, args.over_sampling_batch_size = len(source.buffer), len(source.buffer)
    rest = list(iter_samples(generate_rollout(args, 1, source).samples))
    for sample in rest:
        if sample.index in held:
            assert sample.tokens[: len(held[sample.index])] == held[sample.index]
            assert sample.metadata["start_rollout_id"] == 0
    assert {s.index for s in rest} | {s.index for s in iter_samples(first.samples)} == set(range(16))
    assert {s.rollout_top_p_token_ids is not None for s in rest} == {top_p < 1}
    check_log_probs(setup, rest)


def test_a_pause_that_aborts_is_survived(setup, make_args):
    args = make_args(rollout_max_response_len=200)
    source = RolloutDataSourceWithBuffer(args)

    def pause() -> None:
        deadline = time.monotonic() + 20
        while requests_left(setup) == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        setup.client.pause("abort")
        setup.client.resume()

    pauser = threading.Thread(target=pause)
    pauser.start()
    samples = list(iter_samples(generate_rollout(args, 0, source).samples))
    pauser.join()
    assert any(len(sample.weight_versions) > 1 for sample in samples)
    assert all(s.status != Sample.Status.ABORTED for s in samples)
    check_log_probs(setup, samples)


def test_an_interrupted_rollout_leaves_nothing_running(setup, make_args):
    args = make_args(rollout_max_response_len=900)

    def stop() -> None:
        deadline = time.monotonic() + 20
        while requests_left(setup) == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        interrupt(RuntimeError("engine 0 died"))

    stopper = threading.Thread(target=stop)
    stopper.start()
    with pytest.raises(RuntimeError, match="engine 0 died"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
    stopper.join()
    deadline = time.monotonic() + 5
    while requests_left(setup) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert requests_left(setup) == 0
