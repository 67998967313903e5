"""The contracts by which the rollout manager calls its hooks: the flags that name them declare them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from slime.arguments.traits import Contract


@cache
def contracts_of(caller: Literal["manager", "trainer"]) -> dict[str, Contract]:
    """The contracts of the hooks that ``caller`` calls, by the attribute that holds the dotted path or several."""
    from slime.arguments.groups import slime_flags  # no reward worker needs the declarations

    hooks = ((flag, flag.traits.hook) for flag in slime_flags())
    return {flag.dest: replace(hook, flag=flag.option) for flag, hook in hooks if hook and hook.caller == caller}


ENVIRONMENT = Contract(
    "a class C(args, task) with reset, step, format_observation and close", 2, what="a class", flag="--environment-path"
)
"""The classes of ``slime.arguments.files.environments.environments_of``."""
