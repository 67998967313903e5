"""Imports of a piece of code, and the chain that leads to each: observed in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_WATCH = """
import json, os, sys, time
unwanted, found = set(json.loads(sys.argv.pop(1))), {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in unwanted:
            frame, chain = sys._getframe(1), []
            while frame is not None:
                if frame.f_code.co_name == "<module>" or not frame.f_code.co_filename.startswith("<"):
                    chain.append(frame.f_globals.get("__name__", "?"))
                frame = frame.f_back
            found[name] = list(dict.fromkeys(reversed(chain)))
        return None

sys.meta_path.insert(0, Watch())
begin, code = time.process_time(), 0
try:
    exec(compile(sys.argv.pop(1), "<code>", "exec"), {"__name__": "<code>"})
except SystemExit as end:
    code = end.code or 0
found = {name: chain for name, chain in found.items() if name in sys.modules}  # others were only looked for
report = {"found": found, "seconds": time.process_time() - begin, "code": code}
print("\\nREPORT " + json.dumps(report), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Report:
    """``offenders``: unwanted module -> the modules that led to it, outermost first. ``seconds``: processor time."""

    offenders: dict[str, list[str]]
    seconds: float
    status: int
    output: str

    def explain(self) -> str:
        """One line per unwanted module."""
        return "\n".join(f"{module}: imported by {' -> '.join(chain)}" for module, chain in self.offenders.items())


def watch(code: str, unwanted: Iterable[str], arguments: Sequence[str] = ()) -> Report:
    """Run ``code`` with ``arguments`` on its command line; report the top-level packages of ``unwanted`` it imports."""
    command = [sys.executable, "-c", _WATCH, json.dumps(sorted(unwanted)), textwrap.dedent(code), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    output, mark, report = done.stdout.rpartition("\nREPORT ")
    if not mark:
        raise RuntimeError(f"the code ended its process:\n{done.stderr}")
    facts = json.loads(report)
    return Report(facts["found"], facts["seconds"], facts["code"], output + done.stderr)
