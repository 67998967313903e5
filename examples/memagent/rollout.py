"""MemAgent (arXiv:2507.02259): the functions that flags name.

An execution is a conversation for each chunk of the document, which shares with the one before only the memory that
that one wrote, and one for the answer. Each conversation is a sample.
"""

from __future__ import annotations

import functools
import re
import statistics
from argparse import Namespace
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.executions import conversation_of, problem_of, response_tokens, settings_of
from examples.memagent.prompts import NO_MEMORY, PROMPTS, TokenTemplate
from examples.search_r1.answers import normalized, targets
from slime.observability.logging_utils import log
from slime.rollout import sglang_rollout
from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_utils import extract_boxed_answer
from slime.utils.types import Sample

ANSWER_CHARACTERS = 300
"""Of the end of the answer, in which its box must be."""
_WRAPPER = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|emph)\s*\{([^{}]*)\}")


@dataclass(frozen=True)
class Settings:
    """The keys of ``--custom-config-path``, all with ``memagent_`` before them."""

    chunk_tokens: int = 5000
    memory_tokens: int = 1024
    answer_tokens: int = 1024
    max_chunks: int = 8
    """Of training; longer documents are cut in the middle."""
    eval_max_chunks: int = 1024
    train_final_answer: bool = True
    """False: the loss is that of the memories alone."""
    prompts: Mapping[str, str] = field(default_factory=dict)


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return the samples of all conversations of an execution, in order; in an evaluation that of the answer.

    The document is ``metadata["context"]``. Raises ValueError without one.
    """
    settings = settings_of(args, Settings, "memagent_", PROMPTS)
    tokenizer = sglang_rollout.GenerateState(args).tokenizer
    context = (sample.metadata or {}).get("context")
    if not context:
        raise ValueError(
            f'sample index={sample.index}: metadata["context"] has the document to read, and is '
            f"{'empty' if context is not None else 'missing'}; --metadata-key names the column of the metadata"
        )
    chunks = chunks_of(
        tokens_of(tokenizer, context), settings.chunk_tokens,
        settings.eval_max_chunks if evaluation else settings.max_chunks,
    )  # fmt: skip
    problem = tokenizer.encode(problem_of(sample), add_special_tokens=False)
    memory = tokenizer.encode(NO_MEMORY, add_special_tokens=False)
    kwargs = args.apply_chat_template_kwargs or {}
    update, answer = (TokenTemplate(tokenizer, settings.prompts[name], kwargs) for name in ("update", "answer"))
    made: list[Sample] = []

    async def converse(kind: str, prompt: list[int], limit: int) -> Sample:
        one = conversation_of(sample, prompt, conversation=kind, chunks=len(chunks))
        del one.metadata["context"]  # a long text, in each of them
        made.append(one)
        return await sglang_rollout.generate(args, one, {**sampling_params, "max_new_tokens": limit}, evaluation)

    for chunk in chunks:
        prompt = update.fill(problem=problem, memory=memory, section=chunk)
        written = await converse("memory", prompt, settings.memory_tokens)
        if written.status == Sample.Status.ABORTED:
            break
        memory = response_tokens(tokenizer, written)
    else:
        last = await converse("answer", answer.fill(problem=problem, memory=memory), settings.answer_tokens)
        if not settings.train_final_answer:
            last.loss_mask = [0] * last.response_length
    if made[-1].status == Sample.Status.ABORTED:  # the rollout ends: the execution begins again as a whole
        sample.status = Sample.Status.ABORTED
        return sample
    return made[-1] if evaluation else made


@functools.lru_cache(64)
def tokens_of(tokenizer: Any, context: str) -> array[int]:
    """Return the token ids of a document, once for all samples of a group; there are many, which a list makes large."""
    return array("i", tokenizer.encode(context, add_special_tokens=False))


def chunks_of(ids: Sequence[int], size: int, most: int) -> list[Sequence[int]]:
    """Return ``ids`` in chunks of ``size``; of more than ``most`` chunks' worth the middle is left out."""
    room = size * most
    if len(ids) > room:
        ids = [*ids[: room // 2], *ids[len(ids) - (room - room // 2) :]]
    return [ids[i : i + size] for i in range(0, len(ids), size)]


async def reward_func(args: Namespace, sample: Sample | list[Sample], **kwargs: Any) -> float | list[float]:
    """Return the score of an execution's answer (``--custom-rm-path``), once for each of its samples."""
    if isinstance(sample, Sample):
        return score(sample.response, sample.label)
    [answer] = [one for one in sample if one.metadata["conversation"] == "answer"]
    return [score(answer.response, answer.label)] * len(sample)


def score(response: str, label: Any) -> float:
    """Return 1 when the last box in the end of ``response`` has one of the answers of ``label``, else 0."""
    return float(plain(answer_in(response)) in [plain(target) for target in targets(label)])


def answer_in(response: str) -> str:
    """Return what the last box says in the last ``ANSWER_CHARACTERS``; "" without one."""
    return extract_boxed_answer(final_answer(response)[-ANSWER_CHARACTERS:]) or ""


def plain(answer: str) -> str:
    """Return an answer as it is compared: without commands of LaTeX around it, and as SQuAD's evaluation does."""
    return normalized(_WRAPPER.sub(r"\1", answer))


def eval_log(rollout_id: int, args: Namespace, data: dict[str, Any], extra_metrics: dict[str, Any] | None) -> bool:
    """Log more about each data set (``--custom-eval-rollout-log-function-path``), and leave the rest to be logged.

    ``sub_em`` is the share of answers that contain a right one, which RULER measures, ``f1`` the mean over words, and
    ``chunks`` the mean number of chunks.
    """
    metrics: dict[str, float] = {}
    for name, result in data.items():
        found: dict[str, list[float]] = {"sub_em": [], "f1": [], "chunks": []}
        for one in result["samples"]:
            said, right = final_answer(one.response), targets(one.label)
            found["sub_em"].append(float(any(plain(target) in plain(said) for target in right)))
            found["f1"].append(max(f1_score(answer_in(said), target)[0] for target in right))
            found["chunks"].append(one.metadata["chunks"])
        metrics |= {f"eval/{name}/{key}": statistics.fmean(values) for key, values in found.items() if values}
    log(args, {**metrics, "eval/step": rollout_id}, "eval/step")
    return False
