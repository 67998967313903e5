"""Gloo groups of a trainer rank: one polling thread, and what goes over them."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.utils import distributed_utils
from tests.support.distributed import run_distributed


@pytest.mark.slow
def test_gloo_groups_share_a_device() -> None:
    for found in run_distributed("tests.unit.utils.gloo_ranks:sums_over_groups", 2, {"count": 4}, timeout=60):
        assert found["sums"] == [[20 * i + 1] for i in range(4)]
        assert found["timeouts"] == [50, 51, 52, 53]
        assert found["polling"] == 1


def test_objects_of_a_default_group_over_nccl_go_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[Any] = []
    monkeypatch.setattr(distributed_utils, "_gloo_group", "the gloo group")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda found, value, group: used.append(group))
    for backend, expected in (("nccl", "the gloo group"), ("gloo", None)):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        gather_from_world("x")
        assert used.pop() == expected
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(distributed_utils, "_gloo_group", None)  # a trainer that does not begin as ours do
    gather_from_world("x")
    assert used.pop() is None
