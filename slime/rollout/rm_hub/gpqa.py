"""Multiple-choice questions (GPQA): the option letter a response settles on."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.rm_hub.bare_latex import bare_latex
from slime.rollout.rm_hub.labels import accepted_answers

__all__ = ["DEFAULT_VALID_LETTERS", "compute_gpqa_reward"]

DEFAULT_VALID_LETTERS = list(string.ascii_uppercase[:10])

_BEFORE = r"(?:[\s*_\"'“‘`(\[{$]|\\(?:text|textbf|textrm|mathrm|mathbf|mathsf|mathit|boxed)\s*\{|\\[(\[]){0,12}"
_AFTER = r"[\s*_\"'”’`)\]}$\\.]{0,12}"
_MARKS = r"[*_]{0,4}"
_LETTER_OF_A_WORD = "A-Za-z0-9_À-ӿ"  # not those of Chinese, which is written without spaces
_ALONE = rf"(?<![{_LETTER_OF_A_WORD}'’\\-])([{{L}}])(?![{_LETTER_OF_A_WORD}'’]|-\w)"
_NO_PRONOUN = r"(?!(?<=I)\s+(?!(?:is|because|since|as|and|or)\b)[a-z])"
_NO_WORD = (  # "A photon" and "I think" name no option, "A because" does
    r"(?!(?<=[AI])\s+(?!(?:is|was|has|would|seems|because|since|as|and|or|but|not|with|for|given|in|on|at|by|from|due|"
    r"where|when|which|that|based|according|instead|over|if|then|via)\b)[a-z])"
)
_NOT_DENIED = (
    r"(?!\s+(?:is|was|can|could|does|would|seems|looks)(?:n['’]t|\s+(?:not|wrong|incorrect|false|out|ruled|be\s+ruled|"
    r"eliminated|excluded|impossible|unlikely)\b))"
)
_STATES = r"(?:is|are|was|would\s+be|should\s+be|must\s+be|has\s+to\s+be)"
_HEDGE = r"(?:(?:therefore|thus|hence|indeed|clearly|likely|most\s+likely|probably|simply|definitely)\s+)?"
_PRAISE = r"(?:only|most|single|best|final|true|likely|plausible|appropriate|accurate|correct|right)"
_NAMES_ANSWER = (
    rf"(?i:\banswer|(?:correct|right|best|final|my)\s+(?:option|choice)|\b(?:option|choice){_MARKS}\s*(?={_STATES}|[:=]))"
    rf"{_MARKS}\s*(?i:{_STATES}\b)?\s*[:=]?{_MARKS}\s*(?i:{_HEDGE})"
)
_IS_ANSWER = (
    rf"{_ALONE}{_AFTER}\s(?i:{_STATES}|seems|looks)\s+(?i:{_HEDGE}(?:the\s+)?(?:{_PRAISE}\s+)*"
    r"(?:correct|right|best|answer|option|choice)\b)"
)

_SIGNS = re.escape("<>=≤≥≠≈≡~+±∓/^|%°√∞∈∉∪∩→←⇒⇔⊂⊆∧∨¬∂∇∝")

_LETTER_FORMS = (  # from the most explicit on; of the matches of a form the last counts
    r"\\boxed\{\s*(?:\\(?:text|mathrm|textbf|mathbf)\{)?\s*\(?\s*([{L}])\s*\)?\s*\.?\s*\}",
    _NAMES_ANSWER + rf"{_BEFORE}(?i:(?:option|choice)\s+)?{_BEFORE}{_ALONE}{_NO_PRONOUN}|" + _IS_ANSWER,
    r"^\s*[*\"'(\[]*([{L}])[*\"')\].:]*\s*$",
    rf"(?i:option|choice)\s+[*\"'(\[]*{_ALONE}{_NO_PRONOUN}{_NOT_DENIED}",
    r"\(([{L}])\)",
    _ALONE + _NO_WORD,
)


def compute_gpqa_reward(response: str | None, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 when the response picks the right option, else 0.0. Only text after the reasoning counts.

    ``label`` is the right letter, the index of the right choice, or its text. ``metadata`` may hold ``choices`` (list,
    or dict by letter), ``valid_letters``, ``correct_letter``, and the right answer's text as ``correct_answer`` or
    ``answer_text``. Without a letter in the response, the text of the right answer is looked for.
    """
    if response is None:
        return 0.0
    metadata = metadata or {}
    choices = metadata.get("choices")
    texts = [str(c) for c in (choices.values() if isinstance(choices, Mapping) else () if choices is None else choices)]
    label = _plain_label(label)
    letters = _valid_letters(metadata.get("valid_letters"), choices, texts)
    correct = _correct_letter(label, metadata, letters, texts)
    final = final_answer(response)
    given = _given_letter(final, letters)
    if given is not None and correct is not None:
        return float(given == correct)
    targets = [metadata.get("correct_answer"), metadata.get("answer_text")]
    if correct is not None and letters.index(correct) < len(texts):
        targets.append(texts[letters.index(correct)])
    if isinstance(label, str) and len(label.strip()) > 1:
        targets.append(label)
    named = [str(target) for target in targets if target]
    if given is not None and letters.index(given) < len(texts):
        return float(any(_same(texts[letters.index(given)], target) for target in named))
    return float(any(_mentions(final, target, texts) for target in named))


def best_answers(label: object, metadata: Mapping[str, Any]) -> list[str]:
    """Return responses of which one should be right: each option, and the texts of the right one."""
    letters = metadata.get("valid_letters")
    options = [f"Answer: {letter}" for letter in (letters if letters is not None else DEFAULT_VALID_LETTERS)]
    texts = (label, metadata.get("correct_answer"), metadata.get("answer_text"))
    return options + [text for text in texts if isinstance(text, str)]


def _plain_label(label: object) -> Any:
    """A letter, an index or a text: also those of NumPy, of a list of one, and of an object with a key."""
    if hasattr(label, "tolist"):
        label = label.tolist()
    if isinstance(label, (int, float)) or label is None:
        return label
    accepted = accepted_answers(label)
    if len(accepted) > 1:
        raise ValueError(f"gpqa compares with one right option, the label has {len(accepted)}: {label!r:.200}")
    return accepted[0].strip() if accepted else None


def _valid_letters(given: Collection[object] | None, choices: object, texts: Sequence[str]) -> list[str]:
    if given is not None and len(given):
        return [str(letter).strip().upper() for letter in given]
    if isinstance(choices, Mapping) and all(len(str(k).strip()) == 1 for k in choices):
        return [str(k).strip().upper() for k in choices]
    return list(string.ascii_uppercase[: len(texts)]) if texts else DEFAULT_VALID_LETTERS


def _correct_letter(label: object, metadata: Mapping[str, Any], letters: list[str], texts: list[str]) -> str | None:
    stated = metadata.get("correct_letter")
    if isinstance(stated, str) and stated.strip().upper() in letters:
        return stated.strip().upper()
    if isinstance(label, float) and label.is_integer():  # as columns with gaps are read
        label = int(label)
    if isinstance(label, int) and not isinstance(label, bool):
        return letters[label] if 0 <= label < len(letters) else None
    if isinstance(label, str) and label.strip().strip("().").upper() in letters:
        return label.strip().strip("().").upper()
    wanted = [
        t for t in (label, metadata.get("correct_answer"), metadata.get("answer_text")) if isinstance(t, str) and t
    ]
    for text in wanted:  # choices may differ only in what is no letter or digit: "x > 5" and "x < 5"
        same = [choice.strip() == text.strip() for choice in texts]
        same = same if any(same) else [_same(choice, text) for choice in texts]
        if any(same) and same.index(True) < len(letters):
            return letters[same.index(True)] if sum(same) == 1 else None
    if isinstance(label, str) and label.isdecimal() and int(label) < len(texts):  # an index that was read as text
        return letters[int(label)]
    return None


def _given_letter(text: str, letters: Sequence[str]) -> str | None:
    allowed = "".join(map(re.escape, letters))
    text = re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", text)  # what the forms skip stays short
    for form in _LETTER_FORMS:
        found = list(re.finditer(form.replace("{L}", allowed), text, re.MULTILINE))
        if found:
            return next(letter for letter in found[-1].groups() if letter)
    return None


def _mentions(text: str, target: str, choices: Sequence[str]) -> bool:
    """True when the words of ``target`` are in ``text``, not only within another choice ("blue" in "dark blue")."""
    words, padded = f" {_plain(target)} ", f" {_plain(text)} "
    for choice in choices:
        longer = f" {_plain(choice)} "
        if words in longer and words != longer:
            padded = padded.replace(longer, " | ")
    return bool(words.strip()) and words in padded


def _same(one: str, other: str) -> bool:
    return one.strip() == other.strip() or (_plain(one) != "" and _plain(one) == _plain(other))


def _plain(text: str) -> str:
    """Return the words, numbers and mathematical signs of ``text``, separated by single spaces."""
    text = unicodedata.normalize("NFKC", bare_latex(text)).replace("−", "-").casefold()
    return " ".join(re.findall(rf"-?\d+(?:\.\d+)?|[^\W\d_]+|[{_SIGNS}]|(?<=\s)-(?=\s)|(?<!\w)-(?=[^\W\d_])", text))
