"""``--deterministic-mode`` asks for deterministic kernels, of torch and of what CUDA brings along."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from slime.backends.megatron_utils.initialize import VARIABLES, enable_deterministic_mode
from slime.utils import accelerator


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def on(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: device)


def test_on_a_cpu_only_torch_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "cpu")
    environment: dict[str, str] = {}
    enable_deterministic_mode(environment)
    assert torch.are_deterministic_algorithms_enabled()
    assert environment == {}


def test_on_cuda_what_is_not_set_is_set_and_what_is_right_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "cuda")
    environment = {"NCCL_ALGO": "Tree", "OTHER": "x"}
    enable_deterministic_mode(environment)
    assert environment == {
        "NCCL_ALGO": "Tree",
        "OTHER": "x",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


@pytest.mark.parametrize("name", VARIABLES)
def test_on_cuda_a_value_that_differs_from_run_to_run_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    on(monkeypatch, "cuda")
    with pytest.raises(ValueError, match=rf"{name}=nvls.*--train-env-vars"):
        enable_deterministic_mode({name: "nvls"})
    assert not torch.are_deterministic_algorithms_enabled()
