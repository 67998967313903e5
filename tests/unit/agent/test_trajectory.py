"""Turns to samples: every rule on a case worked out by hand, and random sessions against a slow version."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.agent.trajectory import TrajectoryManager, TurnRecord, _common_prefix_len
from slime.utils.types import Sample
from tests.support.agents import check_experts, read_by

BASE = Sample(group_index=3, index=7, rollout_id=0, prompt="do it", label="done")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def turn(prompt: list[int], output: list[int], finish: str = "stop", **fields: Any) -> TurnRecord:
    """A turn whose log-probs are minus a hundredth of the ids."""
    return TurnRecord(prompt, output, finish, [-token / 100 for token in output], **fields)


def record(manager: TrajectoryManager, messages: list[dict], reply: str, prompt: list[int], output: list[int]) -> None:
    manager.record_turn("s", turn=turn(prompt, output), prompt_messages=messages, response_message=answer(reply))


def shown(samples: list[Sample]) -> list[tuple[list[int], list[int], list[float]]]:
    """Prompt, response, and what is trained: of each response token the id, negative where it is context."""
    result = []
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        cut = len(sample.tokens) - sample.response_length
        signed = [t if m else -t for t, m in zip(sample.tokens[cut:], sample.loss_mask, strict=True)]
        for token, mask, log_prob in zip(sample.tokens[cut:], sample.loss_mask, sample.rollout_log_probs, strict=True):
            assert log_prob == (-token / 100 if mask else 0.0)
        result.append((sample.tokens[:cut], signed))
    return result


def test_one_turn():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2, 3], [10, 11])
    assert manager.has_session("s")
    assert manager.turn_count("s") == 1
    [sample] = manager.get_trajectory("s", base_sample=BASE, reward=0.5, extra_metadata={"task": "t"})
    assert sample.tokens == [1, 2, 3, 10, 11]
    assert sample.response_length == 2
    assert sample.loss_mask == [1, 1]
    assert sample.rollout_log_probs == [-0.10, -0.11]
    assert (sample.group_index, sample.index, sample.prompt, sample.label) == (3, 7, "do it", "done")
    assert sample.rollout_id == 0
    assert sample.reward == 0.5
    assert sample.status is Sample.Status.COMPLETED
    assert sample.metadata == {"task": "t", "truncated": False, "use_tool": False, "ill_formed": False}
    assert manager.get_trajectory("s", base_sample=BASE) == []
    assert not manager.has_session("s")


def test_without_a_rollout_id_the_index_is_shared():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1], [10])
    assert manager.get_trajectory("s", base_sample=Sample(index=4))[0].rollout_id == 4


def test_a_clean_conversation_is_one_sample():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2], [10, 11])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2, 10, 11, 3, 4], [12])
    record(manager, [user("q"), answer("a"), user("r"), answer("b"), user("s")], "c", [1, 2, 10, 11, 3, 4, 12, 5], [13])
    assert manager.turn_count("s") == 3
    samples = manager.get_trajectory("s", base_sample=BASE, reward=2.0)
    assert shown(samples) == [([1, 2], [10, 11, -3, -4, 12, -5, 13])]


def test_a_changed_latest_answer_gives_way_to_the_prompt():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2], [10, 11, 12])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2, 10, 99, 98, 3], [13])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1, 2], [10, -99, -98, -3, 13])]


def test_an_answer_that_the_prompt_lacks_is_removed():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2], [10, 11])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2], [13])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1, 2], [13])]


@pytest.mark.parametrize("new", [2, 5, 2000])
@pytest.mark.parametrize(("standing", "samples"), [(16, 2), (17, 1), (19, 1), (20, 1)])
def test_what_would_be_given_up_decides_whether_a_new_sample_begins(standing: int, samples: int, new: int):
    """Not the length of the answer, nor of the next one: of 20 tokens less than 4 may go."""
    first, second = list(range(100, 120)), list(range(1000, 1000 + new))
    manager = TrajectoryManager(fork_threshold_tokens=4)
    record(manager, [user("q")], "a", [1, 2], first)
    prompt = [1, 2, *first[:standing], *([99] if standing < 20 else []), 3]
    record(manager, [user("q"), answer("a"), user("r")], "b", prompt, second)
    found = manager.get_trajectory("s", base_sample=BASE)
    kept = first if samples == 2 else first[:standing]
    assert [sample.effective_response_length for sample in found] == ([20, new] if samples == 2 else [len(kept) + new])
    signed = [cell for _, cells in shown(found) for cell in cells]
    assert [cell for cell in signed if cell > 0] == [*kept, *second]
    assert found[0].agent_session["realign_tokens"] == 20 - len(kept)


def test_of_an_answer_of_28000_tokens_only_the_last_one_gives_way():
    first = list(range(100, 28_100))
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2], first)
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2, *first[:-1], 99, 3], list(range(61)))
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert sample.effective_response_length == 27_999 + 61


def test_what_one_path_gives_up_is_trained_on_in_another_where_it_stands():
    """A template that drops the reasoning before a new question only."""
    manager = TrajectoryManager()
    begin = [user("q"), answer("a")]
    record(manager, [user("q")], "a", [1], [10, 11, 12])
    record(manager, [*begin, user("r")], "b", [1, 10, 77, 2], [20])
    record(manager, [*begin, user("s")], "c", [1, 10, 11, 12, 3], [30])
    found = shown(manager.get_trajectory("s", base_sample=BASE))
    assert found == [([1], [10, -77, -2, 20]), ([1], [-10, 11, 12, -3, 30])]


def test_a_change_before_the_latest_answer_begins_a_new_sample():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1, 2], [10])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2, 10, 3], [11])
    record(manager, [user("q"), answer("a"), user("r"), answer("b"), user("s")], "c", [1, 2, 77, 3, 11, 4], [12])
    samples = manager.get_trajectory("s", base_sample=BASE, reward=1.0)
    assert shown(samples) == [([1, 2], [10, -3, 11]), ([1, 2, 77, 3, 11, 4], [12])]
    assert [(sample.reward, sample.rollout_id, sample.index) for sample in samples] == [(1.0, 0, 7)] * 2


def test_a_shared_answer_is_trained_on_the_first_path_only():
    manager = TrajectoryManager()
    begin = [user("q"), answer("a")]
    record(manager, [user("q")], "a", [1], [10])
    record(manager, [*begin, user("r")], "b", [1, 10, 2], [11])
    record(manager, [*begin, user("s")], "c", [1, 10, 3], [12])
    record(manager, [*begin, user("s"), answer("c"), user("t")], "d", [1, 10, 3, 12, 4], [13])
    found = shown(manager.get_trajectory("s", base_sample=BASE))
    assert found == [([1], [10, -2, 11]), ([1], [-10, -3, 12, -4, 13])]


def test_the_same_question_twice_is_two_answers():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1], [10])
    record(manager, [user("q")], "a", [1], [11])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 10, 2], [12])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10, -2, 12]), ([1], [11])]


def test_a_short_answer_that_the_agent_rewrote_is_merged():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a ", [1], [10])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 50, 2], [11])
    node = manager._roots["s"].children[0].children[0]
    assert node.metadata["merged_rewrite"] == {"abandoned_turn_index": 0, "abandoned_response_tokens": 1}
    assert (node.message, node.turn) == (answer("a"), None)
    assert manager.turn_count("s") == 2
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1, 50, 2], [11])]


def test_of_an_answer_that_the_agent_rewrote_the_part_that_stands_is_trained_on():
    manager = TrajectoryManager(fork_threshold_tokens=3)
    record(manager, [user("q")], "it is 5", [1], [10, 11, 12, 13, 14])
    record(manager, [user("q"), answer("it is 6"), user("r")], "b", [1, 10, 11, 12, 50, 2], [20])
    node = manager._roots["s"].children[0].children[0]
    assert node.metadata["merged_rewrite"] == {"abandoned_turn_index": 0, "abandoned_response_tokens": 2}
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert shown([sample]) == [([1], [10, 11, 12, -50, -2, 20])]
    counts = {"generated_tokens": 6, "trained_tokens": 4, "realign_tokens": 2, "forks": 0}
    assert sample.agent_session == {"session": "s", **counts}


def test_an_answer_that_the_agent_rewrote_and_then_continued_from_is_trained_on_whole():
    manager = TrajectoryManager()
    record(manager, [user("q")], "it is 5", [1], [10, 11])
    record(manager, [user("q"), answer("it is 6"), user("r")], "b", [1, 10, 50, 2], [20])
    record(manager, [user("q"), answer("it is 5"), user("s")], "c", [1, 10, 11, 3], [30])
    found = shown(manager.get_trajectory("s", base_sample=BASE))
    assert found == [([1, 10, 50, 2], [20]), ([1], [10, 11, -3, 30])]


def test_an_answer_without_a_message_is_an_empty_one():
    manager = TrajectoryManager()
    manager.record_turn("s", turn=turn([1], [10]), prompt_messages=[user("q")], response_message=None)
    record(manager, [user("q"), answer(""), user("r")], "b", [1, 10, 2], [11])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10, -2, 11])]


@pytest.mark.parametrize("threshold", [0, -1, 1])
def test_a_rewritten_answer_is_kept_when_it_is_not_short(threshold: int):
    manager = TrajectoryManager(fork_threshold_tokens=threshold)
    record(manager, [user("q")], "a ", [1], [10])
    record(manager, [user("q"), answer("a"), user("r")], "b", [1, 50, 2], [11])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10]), ([1, 50, 2], [11])]


def test_a_rewritten_answer_that_was_gone_on_from_is_kept():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a ", [1], [10])
    record(manager, [user("q"), answer("a "), user("r")], "b", [1, 10, 2], [11])
    record(manager, [user("q"), answer("a"), user("r")], "c", [1, 50, 2], [12])
    found = shown(manager.get_trajectory("s", base_sample=BASE))
    assert found == [([1], [10, -2, 11]), ([1, 50, 2], [12])]


def test_of_several_answers_none_is_overwritten(caplog):
    manager = TrajectoryManager()
    record(manager, [user("q")], "x", [1], [10])
    record(manager, [user("q")], "y", [1], [11])
    with caplog.at_level(logging.WARNING):
        record(manager, [user("q"), answer("z"), user("r")], "b", [1, 50, 2], [12])
    assert "2 answers were given there: the conversation forks" in caplog.text
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10]), ([1], [11]), ([1, 50, 2], [12])]


def test_messages_of_other_roles_are_never_merged():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1], [10])
    record(manager, [user("q"), user("r")], "b", [1, 2], [11])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10]), ([1, 2], [11])]


def test_history_that_no_engine_made_is_prompt():
    manager = TrajectoryManager()
    record(manager, [user("q"), answer("given"), user("r")], "a", [1, 2, 3], [10])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1, 2, 3], [10])]


def test_samples_are_cut_at_the_limit():
    def samples(limit: int) -> list[Sample]:
        manager = TrajectoryManager()
        record(manager, [user("q")], "a", [1, 2], [10, 11])
        record(manager, [user("q"), answer("a"), user("r")], "b", [1, 2, 10, 11, 3], [12, 13])
        return manager.get_trajectory("s", base_sample=BASE, max_sample_tokens=limit)

    for limit in (0, 7, 100):
        [whole] = samples(limit)
        assert shown([whole]) == [([1, 2], [10, 11, -3, 12, 13])]
        assert not whole.metadata["truncated"]
    for limit, expected in [(6, [10, 11, -3, 12]), (5, [10, 11, -3]), (3, [10])]:
        [cut] = samples(limit)
        assert shown([cut]) == [([1, 2], expected)]
        assert (cut.metadata["truncated"], cut.status) == (True, Sample.Status.TRUNCATED)
    assert samples(2) == samples(1) == []


def test_what_turns_say_is_in_the_metadata_of_their_sample():
    manager = TrajectoryManager()
    manager.record_turn(
        "s", turn=turn([1], [10], "tool_calls", ill_formed=True), prompt_messages=[user("q")],
        response_message=answer("a"),
    )  # fmt: skip
    manager.record_turn(
        "s", turn=turn([9], [11], "length"), prompt_messages=[user("other")], response_message=answer("b")
    )
    first, second = manager.get_trajectory("s", base_sample=BASE)
    assert first.metadata == {"truncated": False, "use_tool": True, "ill_formed": True}
    assert second.metadata == {"truncated": True, "use_tool": False, "ill_formed": False}
    assert [sample.status.value for sample in (first, second)] == ["completed", "truncated"]


def test_an_answer_that_the_limit_cut_after_a_tool_call_is_truncated():
    manager = TrajectoryManager()
    cut = turn([1], [10], "tool_calls", ill_formed=True, meta_info={"finish_reason": {"type": "length"}})
    manager.record_turn("s", turn=cut, prompt_messages=[user("q")], response_message=answer("a"))
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert (sample.status, sample.metadata["truncated"]) == (Sample.Status.TRUNCATED, True)


def test_flags_are_those_of_the_whole_path():
    """``truncated`` is how the last turn ended, the others hold when they did for any turn; also of earlier samples."""
    manager = TrajectoryManager(fork_threshold_tokens=0)
    history: list[dict] = []
    for number, (finish, ill_formed) in enumerate([("length", True), ("tool_calls", False), ("stop", False)]):
        history.append(user(f"q{number}"))
        manager.record_turn(
            "s", turn=turn([100 * number + 1], [number + 10], finish, ill_formed=ill_formed), prompt_messages=history,
            response_message=answer(f"a{number}"),
        )  # fmt: skip
        history.append(answer(f"a{number}"))
    samples = manager.get_trajectory("s", base_sample=BASE, extra_metadata={"truncated": "theirs"})
    assert shown(samples) == [([1], [10]), ([101], [11]), ([201], [12])]
    assert [s.metadata for s in samples] == [{"truncated": False, "use_tool": True, "ill_formed": True}] * 3


def test_flags_of_another_branch_do_not_count():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1], [10])
    for reply, output, finish in [("b", 11, "length"), ("c", 12, "tool_calls")]:
        messages = [user("q"), answer("a"), user(reply)]
        manager.record_turn(
            "s", turn=turn([1, 10, output], [output], finish), prompt_messages=messages, response_message=answer(reply)
        )
    first, second = manager.get_trajectory("s", base_sample=BASE)
    assert first.metadata == {"truncated": True, "use_tool": False, "ill_formed": False}
    assert second.metadata == {"truncated": False, "use_tool": True, "ill_formed": False}


def test_a_session_without_log_probs_has_samples_without_them():
    manager = TrajectoryManager()
    manager.record_turn(
        "s", turn=TurnRecord([1, 2], [10, 11], "stop"), prompt_messages=[user("q")], response_message=answer("a")
    )
    manager.record_turn(
        "s", turn=TurnRecord([1, 2, 10, 11, 3], [12], "stop"), prompt_messages=[user("q"), answer("a"), user("r")],
        response_message=answer("b"),
    )  # fmt: skip
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert (sample.tokens, sample.loss_mask) == ([1, 2, 10, 11, 3, 12], [1, 1, 0, 1])
    assert sample.rollout_log_probs is None
    assert sample.response_length == 4


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ([-0.1], [], "without log-probs after turns with them"),
        ([], [-0.1], "with log-probs after turns without them"),
    ],
)
def test_either_all_turns_have_log_probs_or_none(first, second, words):
    manager = TrajectoryManager()
    empty = TurnRecord([1], [], "length")
    for turn_of in (TurnRecord([1], [10], "stop", first), empty):
        manager.record_turn("s", turn=turn_of, prompt_messages=[user("q")], response_message=answer("a"))
    with pytest.raises(AssertionError, match=words):
        manager.record_turn(
            "s", turn=TurnRecord([1], [11], "stop", second), prompt_messages=[user("q")], response_message=answer("b")
        )
    assert manager.turn_count("s") == 2
    manager.drop_session("s")
    manager.record_turn(
        "s", turn=TurnRecord([1], [11], "stop", second), prompt_messages=[user("q")], response_message=answer("b")
    )


def test_a_turn_without_output_leaves_what_was_made_before():
    manager = TrajectoryManager()
    record(manager, [user("q")], "a", [1], [10])
    manager.record_turn(
        "s", turn=TurnRecord([1, 99, 2], [], "length"), prompt_messages=[user("q"), answer("a"), user("r")],
        response_message=answer(""),
    )  # fmt: skip
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert shown([sample]) == [([1], [10])]
    assert sample.metadata["truncated"]


def test_a_session_of_turns_without_output_has_no_sample():
    manager = TrajectoryManager()
    manager.record_turn(
        "s", turn=TurnRecord([1], [], "length"), prompt_messages=[user("q")], response_message=answer("")
    )
    assert manager.get_trajectory("s", base_sample=BASE) == []


def test_weight_versions_are_those_of_trained_turns():
    def meta(version: str, prompt: int, **more: Any) -> dict[str, Any]:
        cache = {"prompt_tokens": prompt, "cached_tokens": prompt - 1}
        return {"finish_reason": {"type": "stop"}, "weight_version": version, **cache, **more}

    manager = TrajectoryManager()
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    for messages, first in [
        ([user("q")], turn([1], [10, 11], meta_info=meta("2", 1, weight_versions=spans))),
        ([user("q"), answer("a"), user("r")], turn([1, 10, 11, 2, 3], [12], meta_info=meta("3", 5))),
    ]:
        manager.record_turn("s", turn=first, prompt_messages=messages, response_message=answer("a"))
    [sample] = manager.get_trajectory("s", base_sample=BASE)
    assert sample.weight_versions == ["2", "3"]
    found = [(span["version"], span["start"], span["end"]) for span in sample.weight_version_spans]
    assert found == [("1", 0, 1), ("2", 1, 2), ("3", 4, 5)]
    assert (sample.prefix_cache_info.cached_tokens, sample.prefix_cache_info.total_prompt_tokens) == (4, 6)


def test_mistakes_of_callers(caplog):
    manager = TrajectoryManager()
    with caplog.at_level(logging.WARNING):
        record(manager, [], "a", [1], [10])
    assert "a turn without prompt messages is not recorded" in caplog.text
    assert not manager.has_session("s")
    with pytest.raises(AssertionError, match="session 's': 2 output tokens but 1 log-probs"):
        manager.record_turn(
            "s", turn=TurnRecord([1], [2, 3], "stop", [0.0]), prompt_messages=[user("q")], response_message=answer("a")
        )
    assert manager.turn_count("s") == 0


def test_sessions_do_not_mix_and_can_be_dropped():
    manager = TrajectoryManager()
    for sid, token in [("a", 10), ("b", 20)]:
        manager.record_turn(
            sid, turn=turn([1], [token]), prompt_messages=[user("q")], response_message=answer(str(token))
        )
    manager.drop_session("a")
    manager.drop_session("never there")
    assert manager.get_trajectory("a", base_sample=BASE) == []
    assert shown(manager.get_trajectory("b", base_sample=BASE)) == [([1], [20])]


def test_long_conversations_do_not_recurse():
    manager = TrajectoryManager()
    messages = [user(str(number)) for number in range(1500)]
    record(manager, messages, "a", [1], [10])
    record(manager, [*messages, answer("a"), user("more")], "b", [1, 10, 2], [11])
    assert shown(manager.get_trajectory("s", base_sample=BASE)) == [([1], [10, -2, 11])]


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12), st.integers(1, 5))
def test_common_prefix(a, b, chunk):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert _common_prefix_len(a, b, chunk) == expected


class SlowManager:
    """The rules once more: messages in nested lists, every token a cell of its id and, where it is trained, its key."""

    def __init__(self, threshold: int) -> None:
        self.threshold = threshold
        self.root: dict[str, Any] = {"kids": []}

    def record(self, messages: list[dict], reply: dict, record: TurnRecord) -> None:
        at, left = self.root, list(messages)
        while left and (found := self.find(at, left[0], list(record.prompt_ids))):
            at = found
            left.pop(0)
        answers = [kid for kid in at["kids"] if kid["message"]["role"] == "assistant"]
        if left and left[0]["role"] == "assistant" and len(answers) == 1 and list(record.output_ids):
            only = answers[0]
            if only["turn"] and not only["kids"] and not only["original"]:
                before, made = list(only["turn"].prompt_ids), list(only["turn"].output_ids)
                lengths = [
                    n
                    for n in range(len(made) + 1)
                    if [*before, *made[:n]] == list(record.prompt_ids)[: len(before) + n]
                ]
                stand = max(lengths, default=-1)
                if stand >= 0 and len(made) - stand < self.threshold:
                    original = {**only, "kids": []}
                    cut = TurnRecord(before, made[:stand], "stop", list(only["turn"].output_log_probs)[:stand])
                    only.update(message=left.pop(0), turn=cut if stand else None, original=original)
                    at = only
        for message in left:
            at["kids"].append({"message": message, "turn": None, "kids": [], "original": None})
            at = at["kids"][-1]
        at["kids"].append({"message": reply, "turn": record, "kids": [], "original": None})

    def find(self, at: dict, message: dict, prompt: list[int]) -> dict | None:
        equal = [kid for kid in at["kids"] if kid["message"] == message]
        equal += [kid["original"] for kid in at["kids"] if kid["original"] and kid["original"]["message"] == message]
        found, most = None, -2
        for kid in equal:
            whole = [*kid["turn"].prompt_ids, *kid["turn"].output_ids] if kid["turn"] else []
            lengths = [n for n in range(len(whole) + 1) if whole[:n] == prompt[:n]]
            stand = max(-1, max(lengths) - len(kid["turn"].prompt_ids)) if kid["turn"] else -1
            if stand > most:
                found, most = kid, stand
        for kid in at["kids"]:
            if found and kid["original"] is found:
                kid.update(turn=None, original=None)
                at["kids"].append(found)
                break
        return found

    def samples(self) -> list[tuple[list[int], list[int]]]:
        seen: set[tuple[int, int]] = set()
        found = []

        def walk(node: dict, turns: list[dict]) -> None:
            turns = [*turns, node] if node.get("turn") else turns
            if not node["kids"]:
                found.extend(self.pack(turns, seen))
            for kid in node["kids"]:
                walk(kid, turns)

        walk(self.root, [])
        return found

    def pack(self, turns: list[dict], seen: set[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
        packs: list[dict[str, Any]] = []
        for node in turns:
            prompt, output = list(node["turn"].prompt_ids), list(node["turn"].output_ids)
            pack = packs[-1] if packs else None
            if pack is not None and not output:
                continue
            if pack is not None:
                cells = pack["cells"]
                same = 0
                while same < len(cells) and same < len(prompt) and cells[same][0] == prompt[same]:
                    same += 1
                lost = {key for _, key in cells[same:] if key}
                if same == len(cells) or (same >= pack["answer"] and (not lost or len(lost) < self.threshold)):
                    seen -= lost
                    pack["cells"] = cells[:same] + [(token, None) for token in prompt[same:]]
                else:
                    pack = None
            if pack is None:
                pack = {"prompt": len(prompt), "cells": [(token, None) for token in prompt]}
                packs.append(pack)
            pack["answer"] = len(pack["cells"])
            keys = [(id(node), place) for place in range(len(output))]
            pack["cells"] += [(t, None if key in seen else key) for t, key in zip(output, keys, strict=True)]
            seen |= set(keys)
        shown = [([t if key else -t for t, key in pack["cells"]], pack["prompt"]) for pack in packs]
        return [([-t for t in signed[:cut]], signed[cut:]) for signed, cut in shown if max(signed) > 0]


@st.composite
def sessions(draw: st.DrawFn) -> tuple[int, list[tuple[list[dict], dict, TurnRecord]]]:
    """An agent that starts over, continues from an answer, from an earlier point, or with a history that it changed;
    and prompts that are the tokens the engine saw, or another rendering of them. Ids of generated tokens are unique."""
    threshold = draw(st.sampled_from([0, 2, 3, 1024]))
    turns: list[tuple[list[dict], dict, TurnRecord]] = []
    fresh = 1000
    for _ in range(draw(st.integers(1, 7))):
        messages, prompt = [user(draw(st.sampled_from("qr")))], [1]
        if turns and draw(st.integers(0, 5)):
            before, reply, last = draw(st.sampled_from(turns))
            messages = [*before, reply]
            prompt = [*last.prompt_ids, *last.output_ids]
            how = draw(st.sampled_from(["clean", "clean", "rewrite", "render", "cut"]))
            if how == "rewrite":
                messages[-1] = answer(draw(st.sampled_from(["x", "y"])))
            if how in ("rewrite", "render"):
                place = draw(st.integers(max(0, len(prompt) - 4), len(prompt) - 1))
                prompt = [*prompt[:place], draw(st.integers(500, 503))]
            if how == "cut":
                messages, prompt = messages[: draw(st.integers(1, len(messages)))], prompt[: len(prompt) - 1] or [1]
            for _ in range(draw(st.integers(0, 2))):
                messages = [*messages, user(draw(st.sampled_from("st")))]
                prompt = [*prompt, draw(st.integers(2, 4))]
        output = list(range(fresh, fresh + draw(st.integers(1, 4))))
        fresh += len(output)
        turns.append((messages, answer(draw(st.sampled_from("ab"))), turn(prompt, output)))
    return threshold, turns


@settings(max_examples=100, deadline=None)
@given(sessions())
def test_random_sessions_are_what_the_slow_version_makes_of_them(session):
    check(session)


@pytest.mark.soak
@settings(max_examples=10_000, deadline=None)
@given(sessions())
def test_many_random_sessions_are_what_the_slow_version_makes_of_them(session):
    check(session)


def check(session: tuple[int, list[tuple[list[dict], dict, TurnRecord]]]) -> None:
    threshold, turns = session
    manager, slow = TrajectoryManager(fork_threshold_tokens=threshold), SlowManager(threshold)
    for number, (messages, reply, one) in enumerate(turns):
        manager.record_turn("s", turn=read_by(one, number), prompt_messages=messages, response_message=reply)
        slow.record(messages, reply, one)
    assert manager.turn_count("s") == len(turns)
    samples = manager.get_trajectory("s", base_sample=BASE)
    found = shown(samples)
    assert found == slow.samples()
    check_experts(samples, [[*one.prompt_ids, *one.output_ids] for _, _, one in turns])
    # every token is trained once at most
    trained = [cell for _, cells in found for cell in cells if cell > 0]
    assert len(trained) == len(set(trained))
    assert set(trained) <= {token for _, _, one in turns for token in one.output_ids}
    answered: list[list[dict]] = []
    for messages, reply, one in turns:
        whole, after = [*one.prompt_ids, *one.output_ids], [*messages, reply]
        later = [other.prompt_ids for asked, _, other in turns if asked[: len(after)] == after]
        if [*answered, after].count(after) > 1 or any(
            m == messages and r == reply and o is not one for m, r, o in turns
        ):
            later = []  # of two equal answers those continue from the one that they repeat more of
        answered.append(after)
        rewritten = any(asked[: len(messages)] == messages and len(asked) > len(messages) for asked, _, _ in turns)
        if threshold <= 0 or not (later or rewritten):
            assert set(one.output_ids) <= set(trained)
        for prompt in later:  # and what it repeats is trained
            same = _common_prefix_len(whole, prompt)
            assert set(whole[len(one.prompt_ids) : same]) <= set(trained)
    # a sample ends with exactly what the engine saw and made in one of the turns
    whole = [[*one.prompt_ids, *one.output_ids] for _, _, one in turns]
    assert all([*prompt, *map(abs, cells)] in whole for prompt, cells in found)
