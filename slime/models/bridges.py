"""Families of the package mbridge, which slime has no entry for: their names, and what mbridge says of a config."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DESCRIBE = "slime.backends.megatron_utils.model.from_mbridge"
"""The module that asks mbridge. It imports megatron-core, which takes seconds, and is run in another process."""
DEADLINE_S = 600.0
_REGISTERED = re.compile(r"@register_model\(([^)]*)\)")
_NAME = re.compile(r"""["']([\w-]+)["']""")


@cache
def bridged_families() -> tuple[str, ...]:
    """Return the ``model_type`` of every language model that the installed mbridge has; () without mbridge.

    They are read from its source. Vision-language models, which are packages there, are left out.
    """
    package = importlib.util.find_spec("mbridge")
    if package is None or package.origin is None:
        return ()
    modules = (Path(package.origin).parent / "models").glob("*.py")
    decorators = [one for path in modules for one in _REGISTERED.findall(path.read_text(encoding="utf-8"))]
    return tuple(sorted(name for one in decorators for name in _NAME.findall(one)))


def bridged_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return ``{"megatron": section}``, the section that a family has in ``facts.yaml``, as mbridge describes it.

    ``config``: the content of ``config.json``. Of a model that Megatron's flags cannot describe it is
    ``{"problem": phrase}``; {} of a family that mbridge does not have.
    """
    known = config.get("model_type") in bridged_families() and "whole_model_type" not in config
    return dict(_asked(json.dumps(config, sort_keys=True))) if known else {}


@cache
def _asked(config: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", DESCRIBE]
    env = {**os.environ, "PYTHONPATH": path}
    try:
        done = subprocess.run(command, input=config, capture_output=True, text=True, env=env, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        return {"problem": f"mbridge has not described it within {DEADLINE_S:.0f} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"problem": f"mbridge cannot describe it: {last}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))
