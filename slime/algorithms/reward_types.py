"""The table of built-in rewards: one entry per value of ``--rm-type``.

The flag's help and rules, the dispatch, the worker processes that grade, the first look at labels and the list in the
documentation all read it. Functions are given by dotted path, so that ``slime.arguments`` can read the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

BOXED = "boxed_"
"""With this prefix a type grades what the last ``\\boxed{}`` of the response holds."""
_HUB = "slime.rollout.rm_hub"


@dataclass(frozen=True)
class RewardType:
    """The definition of a built-in reward.

    name: the value of the flag. reads: what it reads of a response, for the documentation.
    function: dotted path. A rule is ``fn(response, label, metadata) -> reward``, in a worker process; with ``rule``
    False it is ``async fn(args, sample) -> reward``, in the process of the rollout.

    answer: the form in which a rule finds an answer: in a box, on the line of "Answer:", or the text as it is.
    labels: the answer is compared with ``rm_hub.labels.accepted_answers(label)``. metadata: the keys of a sample's
    metadata that are sent to the rule. best_answers: dotted path of ``fn(label, metadata)``, responses of which one
    should be right, for rules that do not compare with labels.
    numbers: of rewards that are objects, the entries that can be trained on. wrong: the reward of an answer that makes
    its rule exceed a limit; None: such a sample has no reward.
    after_reasoning: 0 without a marker of the end of the reasoning.

    needs_url: ``--rm-url`` is required. module: the module that has to be installed, missing: the words for the
    message without it. prepare: dotted path of a function that loads it before an answer is timed. fresh: the module
    may keep what it likes, so that each answer is graded in a new process.
    """

    name: str
    function: str
    reads: str
    rule: bool = True
    answer: Literal["box", "line", "text"] = "text"
    labels: bool = False
    metadata: tuple[str, ...] = ()
    best_answers: str | None = None
    numbers: tuple[str, ...] = ()
    wrong: Any = None
    after_reasoning: bool = False
    needs_url: bool = False
    module: str | None = None
    missing: str = ""
    prepare: str | None = None
    fresh: bool = False


_TABLE = (
    RewardType(
        "remote_rm", f"{_HUB}.remote.remote_rm", "the whole response: the server at `--rm-url` grades it",
        rule=False, needs_url=True,
    ),
    RewardType(
        "deepscaler", f"{_HUB}.rules.grade_deepscaler",
        "the last box after `</think>` (or after `###Response`); without either the reward is 0",
        answer="box", labels=True, wrong=0, after_reasoning=True,
    ),
    RewardType(
        "dapo", f"{_HUB}.rules.grade_dapo",
        "the last `Answer:` line of the last 300 characters; a whole number as a label also as an integer",
        answer="line", labels=True, numbers=("score", "acc"), wrong={"score": -1.0, "acc": False, "pred": "[LIMIT]"},
    ),
    RewardType(
        "math", f"{_HUB}.rules.grade_math", "the last `\\boxed{}` or `\\fbox{}`, wherever it is",
        answer="box", labels=True, wrong=0,
    ),
    RewardType(
        "math_verify", f"{_HUB}.rules.grade_math_verify",
        "what the package math-verify finds after `</think>`: a box, LaTeX or a number",
        answer="box", labels=True, wrong=0, module="math_verify",
        missing='the package math-verify is not installed; pip install "slime[math]"',
        prepare=f"{_HUB}.rules.load_math_verify",
    ),
    RewardType(
        "f1", f"{_HUB}.rules.grade_f1",
        "the text after `</think>`, if there is one; reasoning that begins with `<think>` and has no end is no answer",
        labels=True, wrong=0.0,
    ),
    RewardType(
        "gpqa", f"{_HUB}.gpqa.compute_gpqa_reward",
        "of the text that `f1` reads, the option: a box, `Answer: C` or \"C is the correct answer\", a line with the "
        "letter alone, else the last capital that stands alone. Ten letters, A to J, unless `choices` or "
        "`valid_letters` say otherwise",
        metadata=("choices", "valid_letters", "correct_letter", "correct_answer", "answer_text"), wrong=0.0,
        best_answers=f"{_HUB}.gpqa.best_answers",
    ),
    RewardType(
        "ifbench", f"{_HUB}.ifbench.compute_ifbench_reward", "the text that `f1` reads",
        metadata=("instruction_id_list", "kwargs", "prompt_text", "record_id"), module="evaluation_lib",
        missing="there is no module evaluation_lib, the checkers of IFBench; get them from "
        "https://github.com/allenai/IFBench, put their directory on the PYTHONPATH and install their requirements.txt",
        prepare=f"{_HUB}.ifbench.load_checkers", fresh=True,
    ),
    RewardType("random", f"{_HUB}.remote.coin_toss", "nothing: 0 or 1 by chance", rule=False),
)  # fmt: skip

REWARD_TYPES = {kind.name: kind for kind in _TABLE}


def unboxed(name: str | None) -> str:
    """Return the type that is meant by the value of a flag or of a sample's metadata, "" for none."""
    return (name or "").strip().removeprefix(BOXED)


def reward_type(name: str | None) -> RewardType | None:
    """Return the entry of a name, prefixed or not; None for a name that the table does not have."""
    return REWARD_TYPES.get(unboxed(name))
