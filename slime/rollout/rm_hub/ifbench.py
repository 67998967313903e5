"""Instructions that can be verified (IFBench, arXiv:2507.02833), by the checkers that its authors publish.

They are a separate program: the directory of https://github.com/allenai/IFBench has to be on the ``PYTHONPATH``
of the run, and what its ``requirements.txt`` names has to be installed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from slime.rollout.rm_hub.answer_text import final_answer

__all__ = ["compute_ifbench_reward"]

MODULE = "evaluation_lib"
"""The module in which the published checkers have ``InputExample`` and ``test_instruction_following_strict``."""


def compute_ifbench_reward(response: str | None, label: object, metadata: Mapping[str, Any] | None = None) -> float:
    """Return 1.0 when ``response`` follows every instruction to the letter (prompt-level, strict), else 0.0.

    Instructions are about the answer: reasoning before ``</think>`` and the tokens that end a response are left out.

    ``metadata``: ``instruction_id_list``; ``kwargs``, one dict per instruction (None values count as not given);
    ``prompt_text``, the prompt that the instructions are in; ``record_id``. ``label`` is not read. Raises ValueError
    for metadata that cannot be checked and ImportError without the checkers.
    """
    metadata = metadata or {}
    identifiers = metadata.get("instruction_id_list")
    if not isinstance(identifiers, Sequence) or isinstance(identifiers, str) or not identifiers:
        raise ValueError(
            f"ifbench needs metadata instruction_id_list, a list of instructions, got {identifiers!r:.200}"
        )
    prompt = metadata.get("prompt_text")
    if not isinstance(prompt, str):
        raise ValueError(f"ifbench needs metadata prompt_text, the prompt as one string, got {prompt!r:.200}")
    kwargs = _arguments(metadata.get("kwargs"), len(identifiers))
    checkers = load_checkers()
    example = checkers.InputExample(
        key=metadata.get("record_id", 0), instruction_id_list=list(identifiers), prompt=prompt, kwargs=kwargs
    )
    check = checkers.test_instruction_following_strict
    answer = final_answer(response or "")
    by_prompt = list(inspect.signature(check).parameters)[1] != "response"  # the published form: {prompt: response}
    try:
        result = check(example, {prompt: answer} if by_prompt else answer)
    except KeyError as e:
        if e.args[0] not in identifiers:
            raise
        raise ValueError(f"{MODULE} ({checkers.__file__}) knows no instruction {e}") from e
    return float(bool(result.follow_all_instructions))


@functools.cache
def load_checkers() -> ModuleType:
    """Return the module of the published checkers. Raises ImportError that names their source."""
    try:
        checkers = importlib.import_module(MODULE)
    except ImportError as e:
        raise ImportError(
            f"--rm-type ifbench needs the checkers of https://github.com/allenai/IFBench: {e}. Put their directory on "
            "the PYTHONPATH and install their requirements.txt"
        ) from e
    missing = [name for name in ("InputExample", "test_instruction_following_strict") if not hasattr(checkers, name)]
    if missing:
        raise ImportError(
            f"the module {MODULE} that was found ({checkers.__file__}) is not that of IFBench: it has no "
            f"{' and no '.join(missing)}"
        )
    return checkers


def _arguments(kwargs: object, count: int) -> list[dict[str, Any]]:
    given = [{}] * count if kwargs is None else kwargs
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise ValueError(
            f"ifbench needs metadata kwargs, a list of {count} dicts, one per instruction, got {given!r:.200}"
        )
    wrong = [entry for entry in given if not isinstance(entry, Mapping | None)]
    if wrong:
        raise ValueError(f"ifbench needs metadata kwargs, a list of dicts, got {wrong[0]!r:.200} in it")
    return [{name: value for name, value in (entry or {}).items() if value is not None} for entry in given]
