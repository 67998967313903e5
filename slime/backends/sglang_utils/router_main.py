"""Run a router: ``python -m slime.backends.sglang_utils.router_main PACKAGE OPTIONS.json``.

The file, which only this user can read, keeps the API key off the command line, and spares turning every option into a
flag and back.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from typing import Any


def router_options(router_args: Any, fields: dict[str, Any]) -> Any:
    """Return ``router_args(**fields)``.

    Raises:
        ValueError: the installed router has no such option.
    """
    known = {f.name for f in dataclasses.fields(router_args)}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(
            f"The router {router_args.__module__.split('.')[0]} has no option {', '.join(unknown)}; it has: "
            f"{', '.join(sorted(known))}."
        )
    return router_args(**fields)


def main() -> None:
    """Read the options and serve until a signal ends the process."""
    package, path = sys.argv[1], sys.argv[2]
    with open(path) as file:
        fields = json.load(file)
    launcher = importlib.import_module(f"{package}.launch_router")
    launcher.launch_router(router_options(launcher.RouterArgs, fields))


if __name__ == "__main__":
    main()
