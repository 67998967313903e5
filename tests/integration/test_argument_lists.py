"""The argument lists that ship with slime are those of the installed packages."""

from __future__ import annotations

import json
import shutil

import pytest

from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.source import identity, module_directory

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


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A directory in front of everything importable, and an empty cache."""
    monkeypatch.syspath_prepend(str(tmp_path / "Megatron-LM"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "Megatron-LM" / "megatron"
    directory.mkdir(parents=True)
    return directory


def test_a_checkout_of_megatron_core_is_read_where_it_is_chosen(checkout, monkeypatch):
    """It has the version of the installed package and a field more."""
    monkeypatch.setenv("SLIME_MEGATRON_CORE", "checkout")
    installed = module_directory(catalog.MEGATRON)
    assert installed is not None
    shutil.copytree(installed, checkout / "core", ignore=shutil.ignore_patterns("__pycache__"))
    config = checkout / "core" / "transformer" / "transformer_config.py"
    text = config.read_text()
    marker = "    mtp_num_layers: Optional[int] = None\n"
    assert marker in text
    config.write_text(text.replace(marker, f'{marker}\n    of_a_fork: int = 3\n    """Added by a fork."""\n\n', 1))
    pinned = json.loads(catalog.shipped_list(catalog.MEGATRON).read_text())
    found = {record["name"]: record for record in catalog.records(catalog.MEGATRON)}
    assert set(found) == {record["name"] for record in pinned} | {"of_a_fork"}
    assert (found["of_a_fork"]["kind"], found["of_a_fork"]["default"]) == ("int", 3)
    assert found["of_a_fork"]["help"] == "Added by a fork."


def test_training_scripts_of_a_checkout_use_the_installed_megatron_core(checkout):
    """Megatron-LM's parser takes members of megatron-core's enumerations as types and choices."""
    (checkout / "training").mkdir()
    (checkout / "training" / "arguments.py").write_text(
        "from megatron.core.transformer.enums import AttnBackend\n"
        "def add_megatron_arguments(parser):\n"
        "    group = parser.add_argument_group(title='network size')\n"
        "    group.add_argument('--attention-backend', type=lambda name: AttnBackend[name],\n"
        "                       default=AttnBackend.auto, choices=list(AttnBackend))\n"
        "    return parser\n"
    )
    (record,) = catalog.records(catalog.MEGATRON_LM)
    assert (record["default"], record["kind"]) == ("auto", "str")
    assert {"flash", "fused", "unfused", "local", "auto"} <= set(record["choices"])
