"""A stand-in for a checkout of Megatron-LM on the ``PYTHONPATH``: another megatron.core, and training scripts."""

from __future__ import annotations

from pathlib import Path

OTHER_VERSION = "99.0"
ARGUMENTS = """
import megatron.core

def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int, default=None)
    parser.add_argument("--norm-epsilon", type=float, default=0.125)
    return parser
"""


def make_checkout(root: Path, *, regular: bool = False, arguments: str = ARGUMENTS) -> Path:
    """Write the checkout to ``root``; return it. ``regular``: ``megatron`` has an ``__init__.py``, which fails."""
    files = {
        "core/__init__.py": f"__version__ = {OTHER_VERSION!r}\n",
        "core/package_info.py": "",
        "core/only_here.py": "",
        "training/__init__.py": "",
        "training/arguments.py": arguments,
        "training/broken.py": "import a_package_that_nobody_has\n",
        "legacy/__init__.py": "",
    }
    if regular:
        files["__init__.py"] = "raise ImportError('the checkout was imported')\n"
    for name, text in files.items():
        path = root / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def install_core(site: Path, version: str) -> Path:
    """Write a megatron-core ``version`` to ``site`` as pip would; return it."""
    (site / "megatron" / "core").mkdir(parents=True)
    (site / "megatron" / "core" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    information = site / f"megatron_core-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {version}\n")
    return site
