"""Each repair is needed, and works. The first test fails when megatron has fixed a fault: then remove its repair."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.patches import megatron_patches

import_megatron()
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402
from megatron.core.package_info import __version__ as megatron_version  # noqa: E402


def _without_te() -> bool:
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    return not HAVE_TE


pytestmark = pytest.mark.skipif(not _without_te(), reason="TransformerEngine is installed: other code paths")


@pytest.mark.parametrize("name", [repair.__name__ for repair in megatron_patches.PATCHES])
def test_the_installed_megatron_still_needs(name: str) -> None:
    assert name in megatron_patches.apply(), f"megatron-core {megatron_version} no longer needs {name}: remove it"


def test_router_gemm_falls_back_to_torch() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    generator = torch.Generator().manual_seed(0)
    inputs, weight = torch.randn(5, 4, generator=generator), torch.randn(3, 4, generator=generator)
    out = router_gating_linear(inputs, weight, None, torch.float32)
    torch.testing.assert_close(out, inputs @ weight.T)


def test_restoring_the_step() -> None:
    repaired = DistributedOptimizer._set_main_param_and_optimizer_states
    assert megatron_patches.restoring_adam_step_fails(inspect.unwrap(repaired))
    assert not megatron_patches.restoring_adam_step_fails(repaired)


def test_loading_gives_each_parameter_its_step() -> None:
    repaired = DistributedOptimizer.load_state_dict
    assert megatron_patches.loading_shares_adam_step(inspect.unwrap(repaired))
    assert not megatron_patches.loading_shares_adam_step(repaired)


def test_the_state_of_an_optimizer_without_parameters() -> None:
    repaired = DistributedOptimizer.state_dict
    assert megatron_patches.state_of_no_parameters_fails(inspect.unwrap(repaired))
    optimizer = torch.optim.AdamW([{"params": [], "wd_mult": 1.0}], lr=0.5)
    (group,) = repaired(SimpleNamespace(optimizer=optimizer, grad_scaler=None))["optimizer"]["param_groups"]
    assert (group["lr"], group["wd_mult"], group["step"]) == (0.5, 1.0, 0)
    assert "params" not in group


@pytest.mark.parametrize(("load", "steps"), [("stock", [5.0, 5.0]), ("repaired", [4.0, 4.0])])
def test_one_update_after_a_load_advances_the_step_by_one(load: str, steps: list[float]) -> None:
    """From step 3 one update leads to step 4; with the shared tensor two parameters lead to 5."""
    method = DistributedOptimizer.load_state_dict
    parameters, optimizer = megatron_patches.load_at_step_three(inspect.unwrap(method) if load == "stock" else method)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [optimizer.state[parameter]["step"].item() for parameter in parameters] == steps


def test_applying_twice_changes_nothing() -> None:
    before = DistributedOptimizer.load_state_dict
    assert megatron_patches.apply() == megatron_patches.apply()
    assert DistributedOptimizer.load_state_dict is before


def test_recomputed_modules_have_the_gradients_of_kept_ones() -> None:
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((x.tanh() * factor).sum(), x)
    checkpoint = CheckpointWithoutOutput()
    hidden = checkpoint.checkpoint(torch.tanh, x)
    result = hidden * factor
    checkpoint.discard_output_and_register_recompute(result)
    assert hidden.untyped_storage().size() == 0
    result.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_the_norm_of_gradients_is_not_read_on_the_host() -> None:
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    def norm(implementation: Any, gradients: list[torch.Tensor]) -> torch.Tensor:
        return implementation(65536, torch.zeros(1, dtype=torch.int), [gradients], False)[0]

    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n + 1, generator=generator) for n in range(30)]
    expected, found = (norm(f, gradients) for f in (local_multi_tensor_l2_norm, clip_grads.l2_norm_impl))
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found[0], torch.cat(gradients).double().norm().float())
    without_numbers = [gradient.to("meta") for gradient in gradients]
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        norm(local_multi_tensor_l2_norm, without_numbers)
    assert norm(clip_grads.l2_norm_impl, without_numbers).is_meta
