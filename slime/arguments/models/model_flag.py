"""``ModelFlag``: one Megatron flag of a model, and where its value comes from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

GROUPS = ("spec", "size", "norms", "attention", "positions", "vocabulary", "experts", "router", "run")


@dataclass(frozen=True)
class ModelFlag:
    """``value``: True or False for a switch that is given or absent, None for a flag that must not have a value.

    ``key`` is the config key that says so, empty where the family alone decides; ``stated`` is what stands there when
    that is not the value itself. ``written``: the flag belongs on a
    command line (what equals Megatron's default may be left out). ``checked``: another value is another model, not
    another way to compute the same.
    """

    group: str
    option: str
    value: Any
    key: str = ""
    stated: str = ""
    written: bool = True
    checked: bool = True

    def words(self) -> list[str]:
        """The words of a command line."""
        if not self.written or self.value is None or self.value is False:
            return []
        if self.value is True:
            return [self.option]
        if self.option == "--moe-layer-freq":
            return [self.option, pattern(self.value)]
        values = self.value if isinstance(self.value, list) else [self.value]
        return [self.option, *map(plain, values)]


def plain(value: Any) -> str:
    """A value as a user would type it: ``1e-6``, ``40`` for 40.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return re.sub(r"e([-+])0", r"e\1", str(value))


def pattern(layers: list[int]) -> str:
    """One entry per layer, shortened: ``[0]*3+[1]*58``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][0] == layer:
            runs[-1][1] += 1
        else:
            runs.append([layer, 1])
    return "+".join(f"[{layer}]*{count}" for layer, count in runs)
