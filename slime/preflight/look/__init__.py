"""A look at prompts and hooks before anything is started: what would end the run minutes later is reported at once.

It is taken in a separate process, which imports users' code and may be ended in any state of that code. ``--dry-run``
and the start of a run take the same look.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Findings:
    """Sentences: what a run would fail for, what may be a mistake, what could not be looked at here."""

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def begins(self, what: str) -> None:
        """Note the next step, to be named if it does not end."""
