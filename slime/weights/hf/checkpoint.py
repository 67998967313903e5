"""Read a Hugging Face checkpoint directory without loading more of it than is asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint directory. Raises FileNotFoundError saying what a checkpoint needs."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {hf_dir} is not a Hugging Face checkpoint directory")
    return _read_json(path)


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return ``quantization_config`` of a model's ``config.json``, or of its text model's."""
    found: dict[str, Any] | None = config.get("quantization_config")
    return found or (config.get("text_config") or {}).get("quantization_config")


def _read_json(path: Path) -> Any:
    """Raises ValueError naming the file where it holds no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path} is no JSON file: {e}. Fetch the checkpoint again") from e


def _open(path: Path, framework: str) -> Any:
    """Raises ValueError naming the file where it is damaged or cut off."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as e:
        size = path.stat().st_size if path.is_file() else 0
        raise ValueError(
            f"{path} ({size} bytes) is no whole safetensors file: {e}. Fetch or export the checkpoint again"
        ) from e


class HfCheckpoint:
    """The tensors of a safetensors checkpoint by name; use as a context manager, files are closed at its end.

    ``framework``: whose tensors are returned, ``pt`` or ``numpy``, which needs no torch. Raises FileNotFoundError and
    ValueError, naming the files, where some are missing or damaged.
    """

    def __init__(self, hf_dir: str | Path, framework: str = "pt") -> None:
        self.path, self._framework = Path(hf_dir), framework
        self._files = self._index()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._open.clear()

    def _index(self) -> dict[str, Path]:
        index = self.path / INDEX
        if index.is_file():
            files = {name: self.path / file for name, file in _read_json(index)["weight_map"].items()}
            absent = sorted({path.name for path in files.values() if not path.is_file()})
            if absent:
                raise FileNotFoundError(f"{index} names files that are not there: {', '.join(absent)}")
            return files
        files = {}
        for path in sorted(self.path.glob("*.safetensors")):
            with _open(path, self._framework) as handle:
                names = list(handle.keys())
            for name in names:
                if name in files:
                    raise ValueError(f"tensor {name!r} is in both {files[name]} and {path}, and there is no {INDEX}")
                files[name] = path
        if not files:
            others = sorted(p.name for p in self.path.glob("*.bin")) if self.path.is_dir() else []
            found = f"only {', '.join(others[:3])}; convert it to safetensors" if others else "none"
            raise FileNotFoundError(f"{self.path}: expected *.safetensors files, found {found}")
        return files

    @property
    def names(self) -> frozenset[str]:
        """Return the names of all tensors."""
        return frozenset(self._files)

    def file_of(self, name: str) -> Path:
        """Return the file that holds tensor ``name``."""
        return self._files[name]

    def slice(self, name: str) -> Any:
        """Return a lazy view of tensor ``name``: ``get_shape()``, and indexing reads just those elements."""
        return self._handle(self._files[name]).get_slice(name)

    def tensor(self, name: str) -> Any:
        """Return tensor ``name``."""
        return self._handle(self._files[name]).get_tensor(name)

    def open_all(self) -> None:
        """Open every file: what is damaged is found before anything is read."""
        for path in sorted(set(self._files.values())):
            self._handle(path)

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = _open(path, self._framework)
        return self._open[path]
