"""Pushes of changed weights without trainers and engines: one rank that writes versions, directories as hosts."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.ray.driver.weight_push import WeightFiles
from slime.ray.remote import RemoteFailure
from slime.utils import atomic_file
from slime.utils.structured_error import data_of
from slime.weight_sync import files
from slime.weight_sync.files import DeltaWriter
from slime.weights import versions as version_files
from slime.weights.delta import codec
from slime.weights.delta import host_copy as delta_files
from slime.weights.delta.manifest import Manifest
from tests.support.arguments import run_args

Content = dict[str, bytes]
FILES = 2


def first_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors of several types and sizes, an empty one and a scalar among them."""
    make = torch.Generator().manual_seed(seed)
    weights = {f"layer.{i}.weight": torch.randn(60 + i, 40, generator=make).bfloat16() for i in range(3)}
    return weights | {
        "norm.weight": torch.ones(33, dtype=torch.float32),
        "quantized.weight": torch.randn(50, 50, generator=make).to(torch.float8_e4m3fn),
        "steps": torch.tensor(seed),
        "nothing": torch.empty(0, 4),
    }


def change(weights: dict[str, torch.Tensor], part: float, seed: int) -> None:
    """Change about ``part`` of the elements, to any bits, NaNs included."""
    make = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if tensor.dim() and tensor.numel():
            flat = tensor.view(torch.uint8).reshape(tensor.numel(), -1)
            chosen = torch.rand(tensor.numel(), generator=make) < part
            flat[chosen, -1] ^= torch.randint(1, 255, (int(chosen.sum()),), generator=make, dtype=torch.uint8)


def content_of(directory: Path) -> Content:
    """Return the bytes of every tensor of a checkpoint."""
    found: Content = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update({name: to_bytes(tensor) for name, tensor in load_file(path).items()})
    return found


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return the content of a tensor of any type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class DeltaRun:
    """One life of a run: a trainer, the driver's ``WeightFiles``, and ``hosts``. Needs a process group of one rank."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, hosts: int = 1, seed: int = 0, **flags: Any) -> None:
        self.shared = folder / "shared"
        given = {
            "update_weight_mode": "delta",
            "update_weight_disk_dir": str(self.shared),
            "update_weight_local_checkpoint_dir": str(folder / "local"),
            **flags,
        }
        self.args = run_args(**given)
        self.weights = first_weights(seed)
        self.hosts = [folder / f"host{i}" for i in range(hosts)]
        self.expected: dict[int, Content] = {}
        self.failing_host: int | None = None
        self.writer = DeltaWriter(self.args)
        self.files = WeightFiles(self.args, self._publish, self._load)
        patch.setattr(files, "export_hf", _export)
        patch.setattr(files, "weights_to_push", lambda source: iter(source.model.items()))
        patch.setattr(files, "described_weights", lambda model, args, quantizer: [(n, (), None) for n in model])
        patch.setattr(files, "quantizer_of", lambda args: None)
        patch.setattr(files.TrainerLayout, "current", lambda: SimpleNamespace(is_source=True))
        patch.setattr(delta_files, "usable_cores", lambda: 2)

    def push(self, part: float = 0.01) -> int:
        """Train, and push; return the version. Every host has its content then."""
        self.train(part)
        version = self.files.push([], True)
        assert [content_of(host / f"weight_v{version:06d}") for host in self.hosts] == [self.expected[version]] * len(
            self.hosts
        )
        return version

    def train(self, part: float = 0.01) -> None:
        """Change weights that are to be pushed."""
        change(self.weights, part, seed=len(self.expected) + 1)
        self.files.begin()

    def kinds(self) -> dict[int, str]:
        """Return what lies on the shared directory: number -> whole, or what it changes."""
        found = {}
        for path in version_files.versions(self.shared):
            manifest = Manifest.read(path)
            found[manifest.version.number] = f"since {manifest.base.number}" if manifest.base else "whole"
        return found

    def _publish(self, version: int, engines: Sequence[Any], confirmed: int | None) -> str:
        self.expected[version] = {name: to_bytes(tensor) for name, tensor in self.weights.items()}
        source: Any = SimpleNamespace(model=self.weights, args=self.args)
        return str(files.publish(self.args, source, version, [], delta=self.writer, confirmed=confirmed))

    def _load(self, directory: str, version: int, synchronous_loop: bool) -> None:
        for number, host in enumerate(self.hosts):
            if number == self.failing_host:
                raise RemoteFailure("an engine is gone")
            try:
                delta_files.pull(directory, host)
            except delta_files.NoWayError as e:
                raise RemoteFailure(f"Weight sync could not copy: {type(e).__name__}: {e}", data=data_of(e)) from e


def _export(model: dict[str, torch.Tensor], args: Any, out: Path, *, quantizer: Any) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")
    names = list(model)
    for i in range(FILES):
        save_file({name: model[name].clone() for name in names[i::FILES]}, out / f"model-{i:05d}.safetensors")


TRACED = tuple(str(module.__file__) for module in (delta_files, version_files, atomic_file, codec))


def run_until_line(action: Callable[[], Any], last: int | None) -> int:
    """Do ``action`` in a process that ends, like one that is killed, before its line number ``last`` of slime's.

    Lines of the modules that handle the files of a host are counted as they are run, in all threads. Return how many
    were: fewer than ``last``, or all with None, when the action came to its end.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            lock, count = threading.Lock(), 0

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal count
                if frame.f_code.co_filename not in TRACED:
                    return None
                if event == "line":
                    with lock:
                        count += 1
                        if count == last:
                            os._exit(0)
                return trace

            threading.settrace(trace)
            sys.settrace(trace)
            action()
            sys.settrace(None)
            os.write(write, str(count).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the action failed"
    return int(told) if told else int(last or 0)
