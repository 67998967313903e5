"""``Args``, the type of the namespace that ``parse_args`` returns.

It is for type checkers: a namespace stays an ``argparse.Namespace``, and ``Args`` is that class at run time.

Written by `python -m tools.gen_args`; change it there.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.arguments.args.megatron import MegatronArgs
    from slime.arguments.args.own import OwnArgs
    from slime.arguments.args.router import RouterArgs
    from slime.arguments.args.sglang import SGLangArgs
    from slime.arguments.derived import DerivedArgs

    class Args(OwnArgs, MegatronArgs, SGLangArgs, RouterArgs, DerivedArgs, Namespace):
        """Every attribute of a run's arguments with its type."""

        # A plain Namespace has any attribute; these have the declared ones alone.
        __getattr__: None  # type: ignore[assignment, misc]
        __setattr__: None  # type: ignore[assignment, misc]

else:
    Args = Namespace
