"""Prompts of the agents. ``multi_agent_prompts`` of ``--custom-config-path`` replaces any of these texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PROMPTS = {
    "solver": "{problem}",
    "solution": "Solution {number}:\n{solution}\n",
    "rewriter": (
        "Problem:\n{problem}\n\nThese solutions were written independently, and any of them may be wrong:\n\n"
        "{solutions}\nFind out where they disagree and who is right. Then write one complete solution of your own, "
        "in the form that the problem asks for."
    ),
    "selector": (
        "Problem:\n{problem}\n\nCandidates:\n\n{solutions}\n"
        "Check each of the {count} candidates. End with the line `Judgment: N`, where N is the number of the best one."
    ),
}


def fill(prompts: Mapping[str, str], role: str, problem: str, solutions: Sequence[str] = ()) -> str:
    """Return the text for an agent; solutions are numbered from 1."""
    shown = [prompts["solution"].format(number=n, solution=text) for n, text in enumerate(solutions, 1)]
    return prompts[role].format(problem=problem, solutions="\n".join(shown), count=len(shown))
