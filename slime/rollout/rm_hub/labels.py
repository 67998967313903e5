r"""The forms in which data sets hold right answers, as a list of texts.

A label is a text, a number (those of NumPy too), a list of accepted answers, an object with one of ``KEYS`` (verl's
``reward_model``), or JSON text of these; a text may end in ``#### 42`` as in GSM8K.
"""

from __future__ import annotations

import ast
import json
import math
import numbers
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

__all__ = ["KEYS", "accepted_answers"]

KEYS = (
    "ground_truth",
    "target",
    "answer",
    "answers",
    "text",
    "golden_answers",
    "label",
    "expected_answer",
    "final_answer",
)
_LONGEST_JSON = 100_000


def accepted_answers(label: object) -> list[str]:
    """Return the texts that ``label`` accepts; none for None, blank text and an empty list. Raises ValueError for
    what is no label."""
    if label is None:
        return []
    if isinstance(label, bytes):
        label = label.decode()
    if isinstance(label, str):
        inner = _from_json(label)
        if inner is not None:
            return accepted_answers(inner)
        text = label.rpartition("####")[2] if "####" in label else label
        return [text] if text.strip() else []
    if isinstance(label, Mapping):
        key = next((key for key in KEYS if key in label), None)
        if key is None:
            raise ValueError(
                f"a label that is an object needs one of the keys {', '.join(KEYS)}, got {list(label)!r:.200}"
            )
        return accepted_answers(label[key])
    if hasattr(label, "tolist"):  # of NumPy, a scalar too
        return accepted_answers(label.tolist())
    if isinstance(label, numbers.Number):
        return _of_number(label)
    if isinstance(label, Iterable):
        return list(dict.fromkeys(text for one in label for text in accepted_answers(one)))
    raise ValueError(
        f"a label is a text, a number, a list or an object with a key, got {type(label).__name__} {label!r:.200}"
    )


def _of_number(label: object) -> list[str]:
    if isinstance(label, bool):
        return [str(label)]
    if isinstance(label, (float, Decimal)):
        if not math.isfinite(label):
            return []  # a gap in a column of numbers
        text = format(Decimal(str(label)), "f")
        return list(dict.fromkeys([str(int(label)), text] if label == int(label) else [text, str(label)]))
    return [str(label)]


def _from_json(text: str) -> Any:
    """Return what JSON text, or the ``repr`` of a list or dict, holds; None for any other text.

    A list of bare numbers stays text: ``[1, 2]`` is an interval. So do sets, and objects without one of ``KEYS``.
    """
    text = text.strip()
    if len(text) > _LONGEST_JSON or not re.match(r"\[\s*['\"{]|\{\s*['\"]|\".*\"$", text, re.DOTALL):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    if isinstance(found, (set, tuple)) or (isinstance(found, dict) and not any(key in found for key in KEYS)):
        return None
    return found
