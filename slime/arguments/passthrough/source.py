"""Packages whose arguments are passed through, and the copy of them that Python would import."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from slime.arguments.errors import ArgumentError


@dataclass(frozen=True)
class Source:
    """A package whose arguments are passed through.

    ``package``: its distribution. ``pinned``: the version whose list ships with slime, None for a package that has no
    list. ``reader``: the function of ``reader.py`` that reads it. ``module``: what that imports. ``declared_in``: the
    files of ``module`` that decide about the arguments (patterns), the identity of a checkout.
    """

    package: str
    pinned: str | None
    reader: str
    module: str
    declared_in: tuple[str, ...]


MEGATRON = Source(
    "megatron-core",
    "0.16.1",
    "megatron_config",
    "megatron.core",
    (
        "package_info.py",
        "model_parallel_config.py",
        "transformer/transformer_config.py",
        "transformer/enums.py",
        "optimizer/optimizer_config.py",
        "distributed/distributed_data_parallel_config.py",
    ),
)
SGLANG = Source(
    "sglang",
    "0.5.20",
    "sglang_server_args",
    "sglang",
    ("version.py", "srt/server_args.py", "srt/arg_groups/**/*.py", "srt/function_call/**/*.py", "srt/parser/**/*.py"),
)
ROUTER = Source("sglang-router", "0.3.2", "router_args", "sglang_router", ("*.py",))
SOURCES = (MEGATRON, SGLANG, ROUTER)

# The training scripts of Megatron-LM: in no distribution, on the PYTHONPATH of those who have a checkout.
MEGATRON_LM = Source("Megatron-LM", None, "megatron_training", "megatron.training", ("**/*.py",))

CORE_VARIABLE = "SLIME_MEGATRON_CORE"
INSTALLED, CHECKOUT = "installed", "checkout"
"""The values of the variable: the megatron.core that a run uses where there are two."""


def installed_version(source: Source) -> str | None:
    """Version of the installed package, or None."""
    return _version(source.package, tuple(sys.path))


@cache
def _version(package: str, path: tuple[str, ...]) -> str | None:
    """Of the package that is found on ``path``, which is ``sys.path``: each look reads its whole description."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def module_directory(source: Source) -> Path | None:
    """The directory that ``import`` would take the package from, found without importing anything."""
    top, *below = source.module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # imported already, by something that left no specification
        return None
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        directory = Path(location, *below)
        if directory.is_dir():
            return directory
    return None


def installed_directory(source: Source) -> Path | None:
    """The directory of the installed package; None without one, and for an editable one, which lies elsewhere."""
    try:
        installed = importlib.metadata.distribution(source.package).locate_file(source.module.replace(".", "/"))
    except importlib.metadata.PackageNotFoundError:
        return None
    directory = Path(str(installed))
    return directory if directory.is_dir() else None


def checkout(source: Source) -> Path | None:
    """The directory of a copy that is used and that no version number speaks for: on the PYTHONPATH or editable."""
    if source in (MEGATRON, MEGATRON_LM) and unused_core() is not None:
        return None
    return _in_front(source)


def unused_core() -> Path | None:
    """The copy of megatron.core that Python would import and slime does not use, since another one is installed.

    Launch scripts put a checkout of Megatron-LM on the PYTHONPATH for its training scripts, and with it another
    megatron.core than the tested one. Raises ``ArgumentError`` for a value of ``SLIME_MEGATRON_CORE`` that is none.
    """
    wanted = os.environ.get(CORE_VARIABLE) or INSTALLED
    if wanted not in (INSTALLED, CHECKOUT):
        raise ArgumentError(f"{CORE_VARIABLE} must be {INSTALLED} or {CHECKOUT}, got {wanted!r}")
    if wanted == CHECKOUT or installed_directory(MEGATRON) is None:
        return None
    return _in_front(MEGATRON)


def _in_front(source: Source) -> Path | None:
    """The directory that Python would import, if it is not the installed one."""
    directory, installed = module_directory(source), installed_directory(source)
    if directory is None or (installed is not None and installed.samefile(directory)):
        return None
    return directory


def identity(source: Source) -> str | None:
    """Return what a list of arguments belongs to: a version, the contents of a checkout, or None without either."""
    version, directory = installed_version(source), checkout(source)
    if directory is None:
        return version
    return f"{version or 'checkout'}-{_digest(source, directory)}"


def _digest(source: Source, directory: Path) -> str:
    paths = sorted({path for pattern in source.declared_in for path in directory.glob(pattern)})
    parts = [(str(path.relative_to(directory)), path.read_bytes()) for path in paths]
    if source.pinned is None:  # whether a checkout can be imported depends on what is installed beside it
        stamp = Path(sysconfig.get_paths()["purelib"]).stat().st_mtime_ns
        parts.append(("installed", str(stamp).encode()))
    digest = hashlib.sha256()
    for name, content in [*parts, ("where", str(directory).encode())]:
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:12]
