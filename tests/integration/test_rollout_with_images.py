"""Rollouts with images on a real engine behind a real router: ids, pixels, log-probs; several turns, tools, agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from slime.agent.adapters import AnthropicAdapter
from slime.rollout import eval_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.environments import Environment, Step
from slime.rollout.on_policy_distillation import post_process_rewards, reward_func
from slime.rollout.requests.images import complete, images_of
from slime.rollout.sglang_rollout import GenerateState, generate, generate_rollout
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.types import Sample
from tests.support.agents import served
from tests.support.engines import engine_and_router, engine_args
from tests.support.rollout_args import eval_config, rollout_args
from tests.support.vision_models import VisionReference, drawing, make_vision_checkpoint

pytestmark = pytest.mark.integration
ROWS = [
    ("no picture", []),
    ("<image>what is it?", [drawing(1)]),
    ("first <image>, then <image>: what?", [drawing(2, 200, 130), drawing(3, 64, 64)]),
    ("again <image>", [drawing(4, 40, 90)]),
]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    root = tmp_path_factory.mktemp("images")
    checkpoint = make_vision_checkpoint(root / "model", "qwen3_vl")
    with engine_and_router(engine_args(checkpoint), root) as (engine, router):
        router.add_engine(engine.info)
        reference = VisionReference(checkpoint)
        yield SimpleNamespace(root=root, checkpoint=checkpoint, port=router.port, reference=reference, engine=engine)


@pytest.fixture
def make_args(setup: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(eval_rollout, "EVAL_PROMPT_DATASET", {})

    def make(**overrides: Any) -> Any:
        prompts = tmp_path / "prompts.jsonl"
        rows = [
            {"input": q, "label": "1", "images": [encode_image_for_rollout_engine(i) for i in ii]} for q, ii in ROWS
        ]
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        args = rollout_args(
            hf_checkpoint=str(setup.checkpoint), prompt_data=str(prompts), sglang_router_port=setup.port,
            rollout_num_engines=1, rollout_request_timeout=300.0, rollout_batch_size=4, apply_chat_template=True,
            multimodal_keys={"image": "images"}, **overrides,
        )  # fmt: skip
        http_utils.init_http_client(args)
        return args

    yield make
    if http_utils._http_client is not None:
        run(http_utils._http_client.close())
    SingletonMeta.clear_instances()


def check(setup: SimpleNamespace, sample: Sample) -> None:
    """Assert that the log-probs of a sample's own tokens are those of transformers with the trainer's pixels."""
    tensors = sample.multimodal_train_inputs or {}
    grids = tensors.get("image_grid_thw", torch.zeros(0, 3, dtype=torch.int64))
    assert len(grids) == len(images_of(sample))
    assert sample.tokens.count(setup.reference.image_id) == int(grids.prod(-1).sum()) // 4
    assert len(sample.rollout_log_probs) == sample.response_length == len(sample.loss_mask)
    cut = len(sample.tokens) - sample.response_length
    expected = setup.reference.log_probs(sample.tokens[:cut], sample.tokens[cut:], tensors)
    mask = torch.tensor(sample.loss_mask).bool()
    assert (torch.tensor(sample.rollout_log_probs) - expected)[mask].abs().max() <= 1e-5


@pytest.mark.parametrize("function", [None, "slime.rollout.sglang_streaming_rollout.generate_streaming"])
def test_a_rollout(setup, make_args, function):
    args = make_args(custom_generate_function_path=function)
    groups = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert [len(images_of(group[0])) for group in groups] == [0, 1, 2, 1]
    for group in groups:
        for sample in iter_samples(group):
            check(setup, sample)
        one, other = (sample.multimodal_train_inputs or {} for sample in group)
        assert all(one[key] is other[key] for key in one)  # made and stored once


def interrupt(sample: Sample, kept: int) -> None:
    """Leave a sample as an aborted rollout does, with its first ``kept`` tokens."""
    del sample.tokens[len(sample.tokens) - sample.response_length + kept :]
    for values in (sample.rollout_log_probs, sample.loss_mask):
        assert values is not None
        del values[kept:]
    sample.response_length, sample.status, sample.response = kept, Sample.Status.ABORTED, sample.response[:kept]


def test_a_sample_that_was_aborted_is_continued_by_its_tokens(setup, make_args):
    args = make_args(rollout_max_response_len=12)
    group = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples[2]
    sample = group[0]
    interrupt(sample, 5)
    begun, sample.response = list(sample.tokens), "what is not tokenized again"
    params = GenerateState(args).sampling_params.copy()
    run(generate(args, sample, params))
    assert sample.tokens[: len(begun)] == begun
    assert sample.response_length > 5
    check(setup, sample)


def test_a_run_that_is_resumed(setup, make_args, tmp_path):
    """From the journal of a run that was killed, and from the buffer of a checkpoint: images, pixels and tokens."""

    def source_of(rollout_id: int) -> RolloutDataSourceWithBuffer:
        source = RolloutDataSourceWithBuffer(args)
        source.load(rollout_id)
        return source

    def complete_all(groups: list[Any]) -> list[Sample]:
        found = list(iter_samples(groups))
        complete(found, lambda: GenerateState(args))
        return found

    save = str(tmp_path / "save")
    args = make_args(partial_rollout=True, rollout_max_response_len=12, save=save, load=save, save_interval=1)
    killed = source_of(-1)
    first = list(iter_samples(generate_rollout(args, 0, killed).samples))
    assert killed._recovery.journal is not None
    killed._recovery.journal.flush()
    source = source_of(-1)
    groups = source.get_samples(4)
    for found, sample in zip(complete_all(groups), first, strict=True):
        assert (found.tokens, found.rollout_log_probs) == (sample.tokens, sample.rollout_log_probs)
        assert [i.tobytes() for i in images_of(found)] == [i.tobytes() for i in images_of(sample)]
        check(setup, found)
    for group in groups:
        interrupt(group[1], 5)
    source.add_samples(groups)
    source.save(0)
    resumed = generate_rollout(args, 1, source_of(0)).samples
    assert [len(images_of(group[0])) for group in resumed] == [0, 1, 2, 1]
    for found, sample in zip(complete_all(resumed), first, strict=True):
        kept = len(sample.tokens) - sample.response_length + (5 if sample.index % 2 else 12)
        assert found.tokens[:kept] == sample.tokens[:kept]
        assert found.response_length > 5
        check(setup, found)


def test_an_evaluation(setup, make_args):
    args = make_args(eval_max_response_len=8)
    config = SimpleNamespace(**{
        **vars(eval_config(args.prompt_data, "pictures", input_key="input")), "multimodal_keys": {"image": "images"},
        "apply_chat_template": True, "apply_chat_template_kwargs": None, "n_samples_per_eval_prompt": 1,
        "repetition_penalty": 1.0, "min_new_tokens": None,
    })  # fmt: skip
    args.eval_datasets = [config]
    found = generate_rollout(args, 0, None, evaluation=True).data["pictures"]
    assert [len(images_of(sample)) for sample in found["samples"]] == [0, 1, 2, 1]
    for sample in found["samples"]:
        check(setup, sample)


class Painter(Environment):
    """Answers a turn with a picture, twice."""

    turns = 0

    def step(self, action: str) -> Step:
        self.turns += 1
        return Step(self.turns, done=self.turns == 3)

    def format_observation(self, observation: int) -> list[dict[str, Any]]:
        shown = {"type": "image", "image": drawing(20 + observation, 64 * observation, 96)}
        return [{"role": "tool", "content": [{"type": "text", "text": "look"}, shown]}]


def test_episodes_with_images(setup, make_args):
    """The random model would never end its turn: it stops at many tokens."""
    stops = list(range(60, 120))
    args = make_args(
        custom_generate_function_path="slime.rollout.environments.generate", environment_path=[f"{__name__}.Painter"],
        rollout_max_response_len=200, rollout_stop_token_ids=stops,
    )  # fmt: skip
    groups = generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    assert [len(images_of(group[0])) for group in groups] == [2, 3, 4, 3]
    for sample in iter_samples(groups):
        check(setup, sample)
        assert 0 < sum(sample.loss_mask) < sample.response_length


def test_a_teacher_sees_the_images(setup, make_args):
    args = make_args(rollout_max_response_len=12)
    args.rm_url = f"{setup.engine.info.url}/generate"
    samples = [group[0] for group in generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples]
    for sample in samples:
        sample.reward = run(reward_func(args, sample))
    post_process_rewards(args, samples)
    for sample in samples:
        # those of the whole distribution: a teacher is asked for nothing that it might not sample
        own = torch.tensor(sample.rollout_log_probs)
        assert (torch.tensor(sample.teacher_log_probs) - own).abs().max() < 0.05


async def test_an_agent_shows_images(setup, make_args):
    """Two turns through a gateway; the second one shows another picture, by the protocol of Anthropic."""
    args = make_args()
    state = GenerateState(args)
    adapter = AnthropicAdapter(
        tokenizer=state.tokenizer, processor=state.processor, sglang_url=f"http://127.0.0.1:{setup.port}"
    )
    adapter.open_session("s", sampling_defaults={"max_new_tokens": 10, "temperature": 1.0, "ignore_eos": True})

    def shown(seed: int, *size: int) -> dict[str, Any]:
        data = encode_image_for_rollout_engine(drawing(seed, *size)).partition(",")[2]
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}, shown(31, 90, 120)]}]
    with served(adapter) as handle:
        url = f"http://127.0.0.1:{handle.port}"
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer s"}, timeout=120) as client:
            for _ in range(2):
                body = {"model": "m", "max_tokens": 10, "messages": messages}
                answer = (await client.post("/v1/messages", json=body)).json()
                messages += [{"role": "assistant", "content": answer["content"]}]
                messages += [{"role": "user", "content": [shown(32, 64, 200)]}]
    samples = await adapter.finish_session("s", base_sample=Sample(index=0, group_index=0))
    assert {len(images_of(sample)) for sample in samples} in ({2}, {1, 2})  # two where the template rewrites an answer
    for sample in samples:
        check(setup, sample)
