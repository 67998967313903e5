"""What all readers have in common: ``python -P frame.py READER OUT.json``.

A reader is a module beside this file with a function ``read()`` that imports the package and returns its argument
parser, or records. It runs in a helper process, by path, so that nothing here is importable by the package.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    """The module ``name.py`` beside this file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(reader: str, out: str) -> None:
    """Write what ``reader`` reads to ``out``, as a JSON list of records."""
    found = load(reader).read()
    if isinstance(found, argparse.ArgumentParser):
        found = load("parser_records").records(found)
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
