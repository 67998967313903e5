"""GPU ids of Ray against what a process with CUDA_VISIBLE_DEVICES can address."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import cluster
from slime.ray.cluster import gpu_index
from slime.ray.driver import placement_group


@pytest.mark.parametrize(
    ("ids", "visible", "index"),
    [
        ([], None, 0),
        ([3], None, 3),
        (["3"], "", 3),
        (["3"], "0,1,2,3", 3),
        (["4"], "2,4,6", 1),
        (["GPU-b"], "GPU-a,GPU-b", 1),
    ],
)
def test_index_among_the_visible_devices(ids: list[int | str], visible: str | None, index: int) -> None:
    assert gpu_index(ids, visible) == index


def test_a_hidden_gpu_is_refused() -> None:
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=0,1"):
        gpu_index(["5"], "0,1")


def test_engines_are_placed_by_index_not_by_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--base-gpu-id`` counts visible devices: on GPUs 4 and 5 of a host an engine must get 0 or 1."""
    monkeypatch.setattr(cluster, "ray", SimpleNamespace(get_gpu_ids=lambda: ["5"]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    assert placement_group._SlotProbe().gpu() == 1
