"""``--custom-config-path``: a YAML mapping of namespace attributes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.flag import CONVERTERS, Flag

logger = logging.getLogger(__name__)


def read_mapping(path: str, option: str) -> dict[str, Any]:
    """The mapping in the YAML file ``path`` that ``option`` names. Raises ``ArgumentError``."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError as error:
        raise ArgumentError(f"{option} {path}: there is no such file") from error
    except (OSError, yaml.YAMLError) as error:
        raise ArgumentError(f"{option} {path}: cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ArgumentError(f"{option} {path}: expected a YAML mapping of names to values")
    return content


def read(path: str | None, flags: Iterable[Flag]) -> dict[str, Any]:
    """Attribute -> value of the file; values of known flags get the flag's type (YAML reads ``1e-5`` as text).

    They count as given on the command line, so every check sees them. Raises ``ArgumentError``.
    """
    if path is None:
        return {}
    known = {flag.dest: flag for flag in flags}
    found: dict[str, Any] = {}
    for name, value in read_mapping(path, "--custom-config-path").items():
        attribute = name.replace("-", "_")
        found[attribute] = _typed(value, known[attribute], path) if attribute in known else value
        if attribute in known:
            logger.info("--custom-config-path sets %s to %r", known[attribute].option, found[attribute])
    return found


def _typed(value: Any, flag: Flag, path: str) -> Any:
    if not isinstance(value, str) or flag.kind in ("str", "nullable_str"):
        return value
    try:
        return CONVERTERS[flag.kind](value)
    except ValueError as error:
        raise ArgumentError(f"--custom-config-path {path}: {flag.dest}: expected {flag.kind}, got {value!r}") from error
