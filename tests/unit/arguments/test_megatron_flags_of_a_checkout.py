"""Megatron-LM's own parser, read from a checkout that can be imported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slime.arguments.command_line import all_flags, build_parser, read_words
from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough import catalog, megatron, source
from tests.support.arguments import parse

CHECKOUT = Path(__file__).parents[2] / "data" / "arguments" / "megatron_lm"


def _forget() -> None:
    for cached in (all_flags, megatron.megatron_flags, megatron._training_scripts):
        cached.cache_clear()


@pytest.fixture
def checkout(monkeypatch, tmp_path):
    """A copy of the small checkout in front of everything importable, and an empty cache."""
    root = tmp_path / "Megatron-LM"
    shutil.copytree(CHECKOUT, root)
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _forget()
    yield root / "megatron" / "training" / "arguments.py"
    monkeypatch.undo()
    _forget()


@pytest.fixture
def reads(monkeypatch):
    """The sources that a helper process was started for."""
    started: list[source.Source] = []
    read = catalog.read_installed

    def counted(which):
        started.append(which)
        return read(which)

    monkeypatch.setattr(catalog, "read_installed", counted)
    return started


def test_its_parser_has_the_last_word(checkout) -> None:
    flags = {flag.dest: flag for flag in megatron.megatron_flags()}
    assert flags["norm_epsilon"].default == 1e-6  # megatron-core: 1e-5
    assert flags["moe_router_topk"].default == 4  # megatron-core: 2
    assert flags["num_layers"].help == "Number of transformer layers."
    assert flags["attention_backend"].choices == ("auto", "flash", "fused")
    assert flags["attention_backend"].default == "auto"
    assert flags["fp8"].options == ("--fp8-format",)
    assert flags["ckpt_format"].choices == ("newest", "torch", "torch_dist")
    assert flags["use_cpu_initialization"].default is None


def test_converters_of_every_kind_are_understood(checkout) -> None:
    parser = build_parser(all_flags())
    words = "--moe-layer-freq ([0]*2+[1]) --window-size (128,0) --attention-backend fused --disable-bias-linear"
    values, _ = read_words(parser, [*words.split(), "--no-nightly", "--seeds", "[3]*2", "--recompute-modules", "mlp"])
    assert values == {
        "moe_layer_freq": [0, 0, 1], "window_size": [128, 0], "attention_backend": "fused", "add_bias_linear": False,
        "nightly": False, "seeds": [3, 3], "recompute_modules": ["mlp"],
    }  # fmt: skip
    assert read_words(parser, ["--moe-layer-freq", "2"])[0] == {"moe_layer_freq": 2}
    assert read_words(parser, ["--disable-msc"])[0] == {"enable_msc": False}
    assert read_words(parser, ["--enable-msc"])[0] == {"enable_msc": True}


def test_fields_keep_their_meaning_and_those_it_does_not_offer_stay(checkout) -> None:
    flags = {flag.dest: flag for flag in megatron.megatron_flags()}
    assert flags["num_experts"].field == "num_moe_experts"
    assert flags["apply_layernorm_1p"].field == "layernorm_zero_centered_gamma"
    assert "tensor_model_parallel_size" in flags
    assert "use_gated_attention" in flags
    assert megatron.aliases()["fp4_param"] == "fp4_param_gather"  # Megatron-LM's attribute, set beside the field
    options = [option for flag in megatron.megatron_flags() for option in flag.options]
    assert len(options) == len(set(options))


def test_slime_still_wins(checkout) -> None:
    owners = {flag.dest: flag.source for flag in all_flags()}
    assert owners["lr"] == "slime"
    assert parse().lr == 1e-6
    assert parse("--norm-epsilon", "1e-6").layernorm_epsilon == 1e-6


def test_what_only_it_knows_is_refused_because_nothing_reads_it(checkout) -> None:
    assert parse("--new-loss-trick", "0.5").new_loss_trick == 0.5
    with pytest.raises(ArgumentError, match="--new-loss-trick is not available yet"):
        parse("--new-loss-trick", "0.7")


def test_it_is_read_once_and_again_when_it_changes(checkout, reads) -> None:
    first = catalog.records(catalog.MEGATRON_LM)
    assert catalog.records(catalog.MEGATRON_LM) == first
    assert reads == [catalog.MEGATRON_LM]
    checkout.write_text(checkout.read_text().replace("default=4,", "default=6,"))
    defaults = {record["dest"]: record["default"] for record in catalog.records(catalog.MEGATRON_LM)}
    assert defaults["moe_router_topk"] == 6
    assert len(reads) == 2


def test_a_release_that_builds_its_parser_while_parsing(checkout) -> None:
    checkout.write_text(checkout.read_text().replace("add_megatron_arguments", "_add_all"))
    assert {flag.dest: flag.default for flag in megatron.megatron_flags()}["norm_epsilon"] == 1e-6


def test_a_checkout_that_cannot_be_imported_is_said_once_read_and_done_without(checkout, reads, capsys) -> None:
    checkout.write_text("import transformer_engine_that_is_not_there\n")
    args = parse()
    assert args.moe_router_topk == 2  # megatron-core's
    warned = capsys.readouterr().err
    assert "No module named 'transformer_engine_that_is_not_there'" in warned
    assert str(checkout.parent) in warned
    _forget()
    assert "transformer_engine_that_is_not_there" in megatron.warnings()[0]
    assert reads == [catalog.MEGATRON_LM]


def test_looking_for_it_imports_nothing(checkout) -> None:
    import sys

    before = set(sys.modules)
    assert source.module_directory(catalog.MEGATRON_LM) == checkout.parent
    assert {name for name in sys.modules if name.startswith("megatron")} <= before


def test_a_regular_package_in_front_hides_the_others(monkeypatch, tmp_path) -> None:
    """As Python's own import does."""
    (tmp_path / "somewhere" / "inside").mkdir(parents=True)
    (tmp_path / "somewhere" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = source.Source("nowhere", None, "", "somewhere.inside", ())
    assert source.checkout(found) == tmp_path / "somewhere" / "inside"
    assert source.checkout(source.Source("nowhere", None, "", "somewhere.else", ())) is None


def test_without_a_checkout_there_is_nothing_to_warn_of() -> None:
    assert source.checkout(catalog.MEGATRON_LM) is None
    assert megatron.warnings() == []
