"""``${...}`` in a file: references to other keys and to the environment, resolved by OmegaConf."""

from __future__ import annotations

import re

from slime.arguments.files.yaml_source import Document, KeyPath


def resolve(document: Document) -> None:
    """Replace every interpolation in ``document.data``; what cannot be resolved raises ``ArgumentError``."""
    if not document.mentions("${"):
        return
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data = OmegaConf.to_container(OmegaConf.create(document.data), resolve=True)
    except OmegaConfBaseException as error:
        first = str(error).splitlines()[0]
        document.note(_path(error.full_key), f"{first}; `${{name}}` stands for another key of this file")
        document.check()
        raise
    document.data = data  # type: ignore[assignment]


def _path(full_key: str | None) -> KeyPath:
    """``("datasets", 0, "path")`` for ``datasets[0].path``."""
    steps = re.findall(r"\[(\d+)\]|([^.\[\]]+)", full_key or "")
    return tuple(int(place) if place else name for place, name in steps)
