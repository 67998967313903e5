"""The argument lists that ship with slime are those of the installed packages."""

from __future__ import annotations

import json

import pytest

from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.source import identity

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("source", catalog.SOURCES, ids=[source.package for source in catalog.SOURCES])
def test_shipped_list_is_the_installed_packages(source):
    """Read the package again in a helper process. To renew a list, write its result to the shipped file."""
    if identity(source) != source.pinned:
        pytest.skip(f"{source.package} {identity(source)} is installed, the pinned version is {source.pinned}")
    shipped = json.loads(catalog.shipped_list(source).read_text())
    assert catalog.read_installed(source) == shipped


def test_every_flag_is_the_one_of_the_configuration_class():
    """Each Megatron field that becomes a flag has the type and default that megatron-core gives it."""
    shipped = {record["name"]: record for record in catalog.records(catalog.MEGATRON)}
    # Looked up by hand in megatron-core 0.16.1.
    expected = {
        "hidden_dropout": ("float", 0.1),
        "num_layers": ("int", None),
        "add_bias_linear": ("bool", True),
        "moe_layer_freq": ("layout", 1),
        "attention_backend": ("str", "auto"),
        "normalization": ("str", "LayerNorm"),
        "adam_beta2": ("float", 0.999),
        "overlap_grad_reduce": ("bool", False),
        "kv_lora_rank": ("int", 512),
    }
    assert {name: (shipped[name]["kind"], shipped[name]["default"]) for name in expected} == expected
    for callable_or_dtype in ("init_method", "params_dtype", "timers", "activation_func", "grad_scale_func"):
        assert shipped[callable_or_dtype]["kind"] is None
