"""A round trip: the run starts the generator, which asks an engine and fills the buffer; samples are returned."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from typing import Any

import pytest
import requests

from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout_buffer_example
from slime_plugins.rollout_buffer.generator import base_generator
from slime_plugins.rollout_buffer.generator.base_generator import BaseGenerator
from slime_plugins.rollout_buffer.rollout_buffer_example import Progress, generate_rollout
from tests.support.arguments import run_args
from tests.support.rollout_args import CharTokenizer, rollout_args
from tests.support.rollout_buffers import ChatEngine, ServedBuffer
from tests.unit.slime_plugins.test_group_queue import item

pytestmark = pytest.mark.slow

OTHERS = ("tests.unit.slime_plugins.bad_generators", "tests.unit.slime_plugins.idle_generator")


class ChatML(CharTokenizer):
    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, tools=None, **_: Any) -> Any:
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def __call__(self, text: Any, **options: Any) -> Any:
        offsets = {"offset_mapping": [(i, i + 1) for i in range(len(text))]}
        return {"input_ids": self.encode(text), **(offsets if options.get("return_offsets_mapping") else {})}


class Source:
    """The buffer and the metadata of a data source of ``count`` prompts."""

    def __init__(self, count: int) -> None:
        self.count, self.groups, self.metadata = count, [], {}

    def __len__(self) -> int:
        return self.count

    def get_samples(self, count: int) -> list:
        taken, self.groups = self.groups[:count], self.groups[count:]
        assert len(taken) == count, "no prompt is drawn here"
        return taken

    def add_samples(self, groups: list) -> None:
        self.groups += groups

    def get_buffer_length(self) -> int:
        return len(self.groups)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(json.loads(json.dumps(metadata)))


@pytest.fixture
def engine():
    return ChatEngine()


@pytest.fixture
def served(engine, monkeypatch):
    monkeypatch.setattr(rollout_buffer_example, "_started", {})
    monkeypatch.setattr(
        rollout_buffer_example, "mask_generator", lambda *a: MultiTurnLossMaskGenerator(ChatML(), "qwen")
    )
    with ServedBuffer(*OTHERS) as running:
        running.engine_url = running.serve(engine.app())
        yield running


@pytest.fixture
def make_args(served, tmp_path):
    def make(questions: list[str], **changes: Any) -> Namespace:
        path = tmp_path / "questions.jsonl"
        rows = [{"question": q, "answer": "".join(c for c in q if c.isdigit())} for q in questions]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        host, port = served.engine_url.removeprefix("http://").split(":")
        values = {
            "rollout_buffer_url": served.url, "rollout_task_type": "math", "fetch_trajectory_retry_times": -1,
            "prompt_data": str(path), "input_key": "question", "label_key": "answer", "hf_checkpoint": "none",
            "sglang_router_ip": host, "sglang_router_port": int(port), "rollout_batch_size": 2,
            "n_samples_per_prompt": 2, "num_epoch": 1, "num_rollout": None, "rollout_max_response_len": 64,
            "rollout_temperature": 0.8, "rollout_top_p": 1.0, "loss_mask_type": "qwen", "rollout_request_timeout": 60.0,
        }  # fmt: skip
        return run_args(**{**values, **changes})

    return make


def check(sample: Sample) -> None:
    """The tokens are those of the conversation, the mask is 1 on what the assistant wrote."""
    (question,) = sample.prompt
    head = f"<|im_start|>user\n{question['content']}<|im_end|>\n<|im_start|>assistant\n"
    text = f"{head}{sample.response}<|im_end|>\n"
    assert "".join(map(chr, sample.tokens)) == text
    assert sample.response_length == len(sample.loss_mask) == len(text) - len(head)
    assert sample.loss_mask == [1] * sample.response_length
    assert sample.status is Sample.Status.COMPLETED
    assert sample.reward == int(f"{{{question['content'][1:]}}}" in sample.response)


def test_a_run_of_several_rollouts(served, engine, make_args):
    args = make_args([f"q{i}" for i in range(6)])
    source = Source(6)
    seen: list[Sample] = []
    for rollout_id in range(3):
        output = generate_rollout(args, rollout_id, source)
        assert [len(group) for group in output.samples] == [2, 2]
        assert all(len({s.group_index for s in group}) == 1 for group in output.samples)
        seen += [sample for group in output.samples for sample in group]
        assert output.metrics["rollout/buffer/failed_samples"] == 0
    for sample in seen:
        check(sample)
    assert Counter(sample.metadata["instance_id"] for sample in seen) == {str(i): 2 for i in range(6)}
    assert sorted(sample.index for sample in seen) == list(range(12))
    assert engine.asked == {f"q{i}": 2 for i in range(6)}
    assert engine.bodies[0]["temperature"] == 0.8
    assert engine.bodies[0]["max_tokens"] == 64
    with pytest.raises(RuntimeError, match=r"task-type math has stopped .ended., but only 0 of 2 groups are there"):
        generate_rollout(args, 3, source)


def test_a_restart_leaves_out_what_was_fetched(served, engine, make_args, monkeypatch):
    args = make_args([f"q{i}" for i in range(4)], num_rollout=4)  # two epochs
    source = Source(4)
    first = generate_rollout(args, 0, source)
    saved = json.loads(json.dumps(source.metadata))
    trained = [group[0].metadata["instance_id"] for group in (*first.samples, *source.groups)]
    held, engine.asked = list(source.groups), Counter()
    monkeypatch.setattr(rollout_buffer_example, "_started", {})
    again = Source(4)
    again.metadata, again.groups = saved, held
    rest = [group for rollout_id in (1, 2, 3) for group in generate_rollout(args, rollout_id, again).samples]
    everything = Counter(trained[:2] + [group[0].metadata["instance_id"] for group in rest])
    assert everything == {str(i): 2 for i in range(4)}
    indices = [sample.index for group in (*first.samples, *rest) for sample in group]
    assert sorted(indices) == list(range(16))


def test_the_state_of_the_data_source_says_what_was_fetched(served, make_args, monkeypatch, tmp_path):
    """As above with the source of real runs, killed after a rollout that no checkpoint has."""
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: ChatML())
    ours = make_args([f"q{i}" for i in range(6)], num_rollout=3)
    where = {"save": str(tmp_path / "save"), "load": str(tmp_path / "save"), "save_interval": 1}
    args = rollout_args(**{**vars(ours), **where, "continues_own_checkpoints": True})

    def train(source: Any, rollout_id: int) -> list[str]:
        groups = generate_rollout(args, rollout_id, source).samples
        source.snapshot(rollout_id)
        source.record_consumed(rollout_id, [sample for group in groups for sample in group])
        return [group[0].metadata["instance_id"] for group in groups]

    source = RolloutDataSourceWithBuffer(args)
    trained = train(source, 0)
    source.save(0)
    train(source, 1)
    monkeypatch.setattr(rollout_buffer_example, "_started", {})
    again = RolloutDataSourceWithBuffer(args)
    again.load(0)
    trained += train(again, 1) + train(again, 2)
    assert sorted(trained) == [str(i) for i in range(6)]


def test_an_item_that_cannot_be_made_is_left_out_of_the_loss(served, make_args):
    output = generate_rollout(make_args(["q1", "fail"]), 0, Source(2))
    by_name = {group[0].metadata["instance_id"]: group for group in output.samples}
    for sample in by_name["1"]:
        assert (sample.status, sample.remove_sample, sample.reward) == (Sample.Status.FAILED, True, 0.0)
        assert "500" in sample.metadata["error"]
    assert [sample.remove_sample for sample in by_name["0"]] == [False, False]
    assert output.metrics["rollout/buffer/failed_samples"] == 2


def test_a_generator_that_breaks_ends_the_run_with_its_words(served, make_args):
    with pytest.raises(RuntimeError, match=r"(?s)failed, exit code 3; its log ends: nothing works here.*only 0 of 2"):
        generate_rollout(make_args(["q1"], rollout_task_type="breaks"), 0, Source(1))


def test_fetches_that_bring_nothing_are_counted(served, make_args, monkeypatch):
    monkeypatch.setattr(rollout_buffer_example, "WAIT_S", 0.01)
    with pytest.raises(RuntimeError, match=r"no group for 3 requests in a row.*--fetch-trajectory-retry-times 2"):
        generate_rollout(make_args(["q1"], fetch_trajectory_retry_times=2, rollout_task_type="idle"), 0, Source(1))


def test_a_buffer_that_was_restarted_makes_again_what_was_not_fetched(served, make_args):
    args = make_args([f"q{i}" for i in range(6)])
    source = Source(6)
    groups = generate_rollout(args, 0, source).samples
    served.server.call(served.buffer.stop())
    served.buffer.queue = None
    for rollout_id in (1, 2):
        groups += generate_rollout(args, rollout_id, source).samples
    assert sorted(group[0].metadata["instance_id"] for group in groups) == [str(i) for i in range(6)]


def test_what_reaches_a_restarted_buffer_before_its_run_is_dropped(served, make_args, caplog):
    """A generator of its earlier life is still at work; nothing tells the buffer how large a group is."""
    rollout_buffer_example._started[served.url] = Progress(arrived=7)
    requests.post(f"{served.url}/buffer/write", json=item("stray", "0"), headers=served.headers, timeout=30)
    source = Source(2)
    groups = generate_rollout(make_args(["q0", "q1"]), 1, source).samples
    assert sorted(group[0].metadata["instance_id"] for group in groups) == ["0", "1"]
    assert "stray" not in {sample.metadata["uid"] for group in groups for sample in group}
    assert [len(names) for names in source.metadata["rollout_buffer_fetched"].values()] == [2]
    assert "1 trajectories that reached it before are dropped" in caplog.text


def test_groups_that_are_dropped_are_made_up_for(served, make_args, monkeypatch, caplog):
    """The first group of item 3 is not valid, of four that two rollouts of two need."""
    refused: list[str] = []

    def is_valid_group(group: Any, group_size: int, task_type: str) -> tuple[bool, bool]:
        full = len(group[1]) == group_size
        if full and group[0] == "3" and not refused:
            refused.append(group[0])
            return False, True
        return True, full

    monkeypatch.setattr(base_generator, "is_valid_group", is_valid_group, raising=False)
    args = make_args([f"q{i}" for i in range(4)], num_rollout=2)
    source = Source(4)
    groups = [group for rollout_id in (0, 1) for group in generate_rollout(args, rollout_id, source).samples]
    names = Counter(group[0].metadata["instance_id"] for group in (*groups, *source.groups))
    assert names >= Counter({"0": 1, "1": 1, "2": 1})
    assert len(groups) == 4
    assert "has ended with 1 groups of 2 (1 were not valid): it goes through the prompts once more" in caplog.text


def refuse_all(group: Any, group_size: int, task_type: str) -> tuple[bool, bool]:
    return False, len(group[1]) == group_size


def test_a_generator_whose_groups_are_all_dropped_ends_the_run(served, engine, make_args, monkeypatch):
    monkeypatch.setattr(base_generator, "is_valid_group", refuse_all, raising=False)
    with pytest.raises(RuntimeError, match=r"only 0 of 2 groups are there; .* 6 groups were not valid"):
        generate_rollout(make_args(["q0", "q1", "q2"], num_rollout=1), 0, Source(3))


def test_nothing_but_groups_of_another_size_end_the_run(served, make_args, monkeypatch):
    monkeypatch.setattr(rollout_buffer_example, "MOST_BAD_GROUPS", 0)
    rollout_buffer_example._started[served.url] = Progress()
    start = {"task_type": "idle", "num_repeat_per_sample": 1}
    requests.post(f"{served.url}/start_rollout", json=start, headers=served.headers, timeout=30)
    requests.post(f"{served.url}/buffer/write", json=item("1"), headers=served.headers, timeout=30)
    with pytest.raises(RuntimeError, match="group a: it has 1 trajectories, expected --n-samples-per-prompt 2"):
        generate_rollout(make_args(["q1"]), 0, Source(1))


def test_what_it_cannot_do(make_args):
    with pytest.raises(ValueError, match="makes no evaluations"):
        generate_rollout(make_args(["q1"]), 0, Source(1), evaluation=True)
    with pytest.raises(ValueError, match="needs --rollout-buffer-url"):
        generate_rollout(make_args(["q1"], rollout_buffer_url=None), 0, Source(1))


def test_a_subclass_replaces_what_it_needs(served, tmp_path):
    """As other projects do: rollout and reward functions of their own, on the base's run."""
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps({"instance_id": f"t{i}", "prompt": f"p{i}"}) + "\n" for i in range(3)))
    generator = BaseGenerator("http://nowhere", served.url, num_repeat_per_sample=2, skip_instance_ids=["t1"])

    def rollout(client, messages, sampling_params):
        return [*messages, {"role": "assistant", "content": "x"}]

    generator.entry(str(path), rollout, lambda item: len(item["messages"]), num_epoch=2)
    reply = requests.post(f"{served.url}/get_rollout_data", json={}, headers=served.headers, timeout=30).json()
    fetched = reply["data"]["data"]
    assert Counter(one["instance_id"] for one in fetched) == {"t0": 4, "t1": 2, "t2": 4}
    assert {one["reward"] for one in fetched} == {2}
