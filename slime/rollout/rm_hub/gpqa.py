"""Multiple-choice questions (GPQA): the option letter a response settles on."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["DEFAULT_VALID_LETTERS", "compute_gpqa_reward"]

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:8])

_LETTER_FORMS = (  # in order of how explicit they are; each is searched for its last occurrence
    r"\\boxed\{\s*(?:\\(?:text|mathrm|textbf|mathbf)\{)?\s*\(?\s*([{L}])\s*\)?\s*\.?\s*\}",
    r"(?i:(?:final|correct|my)?\s*(?:answer|option|choice)\s*(?:is|are|:|=)?)\s*:?\s*[*\"'($\[]*\s*(?i:option\s+)?([{L}])\b(?!['’])",
    r"(?i:option|choice)\s+[*\"'(\[]*([{L}])\b",
    r"^\s*[*\"'(\[]*([{L}])[*\"')\].:]*\s*$",
    r"\(([{L}])\)",
)


def compute_gpqa_reward(response: str | None, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 when the response picks the right option, else 0.0. Only text after ``</think>`` counts.

    ``label`` is the right letter, the index of the right choice, or its text. ``metadata`` may hold ``choices`` (list,
    or dict by letter), ``valid_letters``, ``correct_letter``, and the right answer's text as ``correct_answer`` or
    ``answer_text``. Without a letter in the response, the text of the right answer is looked for.
    """
    if response is None:
        return 0.0
    metadata = metadata or {}
    choices = metadata.get("choices")
    texts = [str(c) for c in (choices.values() if isinstance(choices, Mapping) else choices or [])]
    letters = _valid_letters(metadata.get("valid_letters"), choices, texts)
    correct = _correct_letter(label, metadata, letters, texts)
    final = response.rsplit("</think>", 1)[-1]
    given = _given_letter(final, letters)
    if given is not None and correct is not None:
        return float(given == correct)
    targets = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if correct is not None and letters.index(correct) < len(texts):
        targets.append(texts[letters.index(correct)])
    if isinstance(label, str) and len(label.strip()) > 1:
        targets.append(label)
    if given is not None and letters.index(given) < len(texts):
        return float(_plain(texts[letters.index(given)]) in {_plain(t) for t in targets if t})
    padded = f" {_plain(final)} "
    return float(any(_plain(t) and f" {_plain(t)} " in padded for t in targets if t))


def _valid_letters(given: Any, choices: Any, texts: Sequence[str]) -> list[str]:
    if given:
        return [str(letter).strip().upper() for letter in given]
    if isinstance(choices, Mapping) and all(len(str(k).strip()) == 1 for k in choices):
        return [str(k).strip().upper() for k in choices]
    return list(string.ascii_uppercase[: len(texts)]) if texts else DEFAULT_VALID_LETTERS


def _correct_letter(label: Any, metadata: Mapping[str, Any], letters: list[str], texts: list[str]) -> str | None:
    stated = metadata.get("correct_letter")
    if isinstance(stated, str) and stated.strip().upper() in letters:
        return stated.strip().upper()
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    wanted = [label, metadata.get("correct_answer"), metadata.get("answer_text")]
    if isinstance(label, str) and label.strip().strip("().").upper() in letters:
        return label.strip().strip("().").upper()
    for text in wanted:
        for letter, choice in zip(letters, texts, strict=False):
            if isinstance(text, str) and _plain(text) == _plain(choice):
                return letter
    return None


def _given_letter(text: str, letters: Sequence[str]) -> str | None:
    allowed = "".join(map(re.escape, letters))
    for form in _LETTER_FORMS:
        found = re.findall(form.replace("{L}", allowed), text, re.MULTILINE)
        if found:
            return str(found[-1]).upper()
    return None


def _plain(text: Any) -> str:
    return " ".join(re.sub(r"[^0-9a-z]+", " ", str(text).lower()).split())
