"""Judges of two answers, by rule or by a second model that is not trained."""

from __future__ import annotations

import re
from argparse import Namespace

from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import post
from slime.utils.types import Sample

QUESTION = """Two answers were given to the same request.

Request:
{prompt}

Answer A:
{first}

Answer B:
{second}

Which is better? Look for mistakes first and ignore length and style. End with [[A]], [[B]], or [[C]] for a tie."""
_VERDICT = re.compile(r"\[\[([ABC])\]\]")
_WORTH = {"A": 1.0, "B": 0.0, "C": 0.5}


async def nearer_number(args: Namespace, first: Sample, second: Sample) -> float:
    """Return 1 when the first answer is nearer to the label, a number; 0 for the second, 0.5 for a tie."""
    distances = []
    for sample in (first, second):
        text = final_answer(sample.response).strip()
        distances.append(abs(int(text) - int(sample.label)) if text.isdecimal() else float("inf"))  # type: ignore[arg-type]
    return 0.5 if distances[0] == distances[1] else float(distances[0] < distances[1])


async def frozen_model(args: Namespace, first: Sample, second: Sample) -> float:
    """Return the verdict of the model ``judge`` of ``--sglang-config``: 1 for the first answer, 0, or 0.5 for a tie.

    Judges prefer the answer in one of the places: both orders are asked, and the verdicts averaged. One that says
    nothing of the kind counts as a tie.
    """
    return (await _ask(args, first, second) + 1.0 - await _ask(args, second, first)) / 2


async def _ask(args: Namespace, first: Sample, second: Sample) -> float:
    tokenizer = GenerateState(args).tokenizer
    # The policy's template is not to end the judge's message.
    prompt = tokenizer.decode(first.tokens[: len(first.tokens) - first.response_length], skip_special_tokens=True)
    text = QUESTION.format(prompt=prompt, first=final_answer(first.response), second=final_answer(second.response))
    chat = [{"role": "user", "content": text}]
    # The judge has the tokenizer of the policy's family; one of another family needs a template of its own here.
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    params = {"temperature": 0, "max_new_tokens": getattr(args, "judge_max_new_tokens", 1024)}
    reply = await post(get_model_url(args, "judge"), {"text": rendered, "sampling_params": params})
    verdicts = _VERDICT.findall(reply["text"])
    return _WORTH[verdicts[-1]] if verdicts else 0.5
