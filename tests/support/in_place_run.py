"""A trainer of one rank without Megatron, which pushes to real engines: changes in place, or into their memory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.servers.types import EngineInfo
from slime.weight_sync import distributed, in_place, p2p, transport
from slime.weight_sync.in_place import InPlaceTransport
from slime.weight_sync.p2p import P2PTransport
from slime.weight_sync.updater import WeightUpdater
from tests.support.arguments import run_args


class OneRankRun:
    """One life of a trainer whose weights begin as those of ``checkpoint``. Needs a process group of one rank."""

    def __init__(self, checkpoint: Path, patch: pytest.MonkeyPatch, **flags: Any) -> None:
        self.checkpoint = checkpoint
        self.args = run_args(**{"weight_sync_timeout": 60.0, "distributed_backend": "gloo", **flags})
        index = checkpoint / "model.safetensors.index.json"
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        self.weights = {name: one for file in files for name, one in load_file(checkpoint / file).items()}
        self.pushes = 0
        self.updater: WeightUpdater
        layout = transport.TrainerLayout(rank=0, world_size=1, pp_rank=0, pp_size=1, is_source=True)
        patch.setattr(transport.TrainerLayout, "current", classmethod(lambda cls: layout))
        for module in (distributed, in_place, p2p):
            patch.setattr(module, "weights_to_push", lambda source: iter(source.model.items()))
        patch.setattr(
            p2p, "describe_hf_weights", lambda model, args: [(n, tuple(t.shape), t.dtype) for n, t in model.items()]
        )
        self.source: Any = SimpleNamespace(model=self.weights, args=self.args)

    def train(self, part: float) -> None:
        """Change about ``part`` of the elements."""
        self.pushes += 1
        make = torch.Generator().manual_seed(self.pushes)
        for tensor in self.weights.values():
            chosen = torch.rand(tensor.shape, generator=make) < part
            tensor[chosen] += torch.randn(int(chosen.sum()), generator=make).to(tensor.dtype) / 50

    def push(self, engines: Sequence[EngineInfo]) -> int:
        """Push to ``engines``; return the version."""
        self.updater.connect(engines)
        return self.updater.update()

    def export(self, directory: Path) -> Path:
        """Write the weights as a checkpoint; return its directory."""
        shutil.copytree(self.checkpoint, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: tensor.clone() for name, tensor in self.weights.items()}, directory / "model.safetensors")
        return directory


class InPlaceRun(OneRankRun):
    """Sends changes."""

    def __init__(self, checkpoint: Path, patch: pytest.MonkeyPatch, **flags: Any) -> None:
        super().__init__(checkpoint, patch, update_weight_mode="delta", **flags)
        self.transport = InPlaceTransport(self.args)
        self.updater = WeightUpdater(self.args, self.source, self.transport, pause_mode="abort")


class P2PRun(OneRankRun):
    """Writes into the engines' memory."""

    def __init__(self, checkpoint: Path, patch: pytest.MonkeyPatch, **flags: Any) -> None:
        super().__init__(checkpoint, patch, update_weight_transport="p2p", **flags)
        self.transport = P2PTransport(self.args, self.source)
        self.updater = WeightUpdater(self.args, self.source, self.transport, pause_mode="abort")
