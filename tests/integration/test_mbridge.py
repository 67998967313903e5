"""mbridge: a second opinion of our weight maps and model flags, and runs of a family that only it has.

Mixtral is that family; on every change ``test_model_families.py`` compares it with transformers in every layout. Whole
runs of it are in soak.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences
from slime.backends.megatron_utils.checkpoints.to_torch_dist import to_torch_dist
from tests.support.megatron_references import make_checkpoints
from tests.support.model_families import make_checkpoint
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tools.tiny_model import make_tokenizer

pytestmark = pytest.mark.integration

OURS = ("qwen2", "qwen3", "llama", "qwen2_moe", "qwen3_moe", "glm4_moe", "mimo", "deepseek_v3")
WITHOUT = {
    "qwen2_moe": [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")],
    "mimo": ["model.mtp_layers.0.input_proj.weight"],
    "deepseek_v3": ["model.layers.2.eh_proj.weight"],
}
"""Left out, as mbridge has no dense layers between those with experts; MTP layers are compared nowhere."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: make_checkpoint(folder, name) for name in ("glm4_moe", "mimo", "deepseek_v3")}
    return {**make_checkpoints(folder), **made}


@pytest.fixture
def bridge(name: str, checkpoints: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return mbridge's view of the checkpoint ``name``."""
    from slime.backends.megatron_utils import import_megatron
    from slime.backends.megatron_utils.weights.maps.bridged import bridge_of

    import_megatron()
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.models import DeepseekV3Bridge, MimoBridge

    config = json.loads((Path(checkpoints[name]) / "config.json").read_text())
    if name == "deepseek_v3":  # mbridge 0.15 gives megatron-core's configuration a field that 0.16 does not have
        small = SimpleNamespace(gated_linear_unit=True, mtp_num_layers=None)
        monkeypatch.setattr(DeepseekV3Bridge, "_build_config", lambda self: small)
    if name == "mimo":  # transformers has no class for it
        monkeypatch.setitem(_MODEL_REGISTRY, "qwen2", MimoBridge)
        config["model_type"] = "qwen2"
    return bridge_of(config)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", OURS)
def test_our_weight_maps_are_those_of_mbridge(name: str, ranks: int, bridge: Any, checkpoints: dict[str, str]) -> None:
    """Names, the parameters of every tensor-parallel rank, and the tensors that come of them again."""
    from mbridge.core.parallel_states import ParallelStates
    from safetensors.torch import load_file

    from slime.backends.megatron_utils.checkpoints.convert import described_by
    from slime.backends.megatron_utils.weights.maps.rule import as_template
    from slime.weights.hf.checkpoint import read_config

    bridge.mpu = ParallelStates(tp_size=ranks, etp_size=ranks)
    described = described_by(read_config(checkpoints[name]))
    dims = described.dims
    tensors = load_file(Path(checkpoints[name]) / "model.safetensors")
    rules = {rule.hf[0]: rule for rule in described.family.rules}
    compared = set()
    for first in tensors:
        place = as_template(first)
        if place.template not in rules or place.layer == described.num_layers:
            continue  # of an MTP layer, or it follows another one
        rule = rules[place.template]
        names = rule.hf_names(place.layer, place.expert)
        sources = [tensors[one] for one in names]
        parameter = parameter_with(bridge, rule, place, names)
        if parameter is None:
            continue
        shards = [rule.layout.shard(sources, rank, ranks, dims) for rank in range(ranks)]
        like = as_parameter(shards[0], sources, sharded=rule.layout.sharded)
        whole = bridge._weight_to_mcore_format(parameter, sources)
        parts = bridge._weight_split_across_tp(parameter, whole, like, ranks)
        assert all(map(torch.equal, parts, shards)), parameter
        merged = bridge._weight_merge_across_tp(parameter, parts, like) if rule.layout.sharded else shards[0]
        assert all(map(torch.equal, bridge._weight_to_hf_format(parameter, merged)[1], sources)), parameter
        assert all(map(torch.equal, rule.layout.unshard(shards, dims), sources)), parameter
        compared.update(names)
    assert set(tensors) - compared == set(WITHOUT.get(name, ()))


def parameter_with(bridge: Any, rule: Any, place: Any, names: list[str]) -> str | None:
    """Return the name of ours that mbridge knows, whose tensors must be ``names``; None if it knows none."""
    seen = []
    for template in rule.megatron:
        parameter = template.format(layer=place.layer, expert=place.expert)
        try:
            seen.append(bridge._weight_name_mapping_mcore_to_hf(parameter))
        except (NotImplementedError, KeyError):
            continue
        if seen[-1] == names:
            return parameter
    assert not seen, f"mbridge has {seen} for {rule.megatron}, and our map {names}"
    return None


def as_parameter(shard: torch.Tensor, sources: list[torch.Tensor], *, sharded: bool) -> Any:
    """Return an empty parameter with the marks of megatron's, by which mbridge puts most of them together."""
    parameter: Any = torch.empty_like(shard)
    parameter.tensor_model_parallel = sharded
    parameter.partition_dim = int(shard.ndim > 1 and shard.shape[1:] != sources[0].shape[1:])
    return parameter


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "glm4_moe"])
def test_our_model_flags_build_the_configuration_of_mbridge(name: str, checkpoints: dict[str, str]) -> None:
    """Of Qwen's experts mbridge 0.15 leaves out what config.json says of their weights and of a shared one's gate."""
    from slime.backends.megatron_utils.model.from_mbridge import settings
    from slime.models.facts import families

    config = json.loads((Path(checkpoints[name]) / "config.json").read_text())
    ours = families()[name]["megatron"]
    qk_norm = ours["qk_layernorm"]
    found = settings(config)
    assert found["run"] == []
    assert found["bridge"].endswith("Bridge")
    assert found["qk_layernorm"] == (config[qk_norm] if isinstance(qk_norm, str) else qk_norm)
    assert found["qkv_bias"] == bool(ours.get("qkv_bias") or config.get("attention_bias"))
    assert found["router"] == ours.get("router", "softmax")


MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_local_experts": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 1e6,
}  # fmt: skip
ENDS = {"vocab_size": 256, "position_embedding_type": "rope", "rotary_base": 1e6}


def own_bridge(monkeypatch: pytest.MonkeyPatch, **methods: Any) -> None:
    """Register a bridge of Mixtral with other ``methods``."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.models import MixtralBridge

    monkeypatch.setitem(_MODEL_REGISTRY, "mixtral", type("Own", (MixtralBridge,), methods))


def test_a_setting_that_only_mbridge_states_becomes_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.backends.megatron_utils.model.from_mbridge import settings
    from slime.models.megatron_flags import megatron_flags

    own_bridge(monkeypatch, _build_config=with_values(moe_router_topk_scaling_factor=2.5))
    words = megatron_flags({**MIXTRAL, "megatron": settings(MIXTRAL)})
    assert words[words.index("--moe-router-topk-scaling-factor") + 1] == "2.5"
    assert "--moe-router-pre-softmax" not in words  # the weights of Mixtral's experts add up to 1


def with_values(**values: Any) -> Any:
    """Return a ``_build_config`` that sets ``values`` in what Mixtral's bridge builds."""

    def build(self: Any) -> Any:
        from mbridge.models import MixtralBridge

        config = MixtralBridge._build_config(self)
        vars(config).update(values)
        return config

    return build


@pytest.mark.parametrize(
    ("config", "methods", "message"),
    [
        ({"rope_theta": None}, {}, "rotary_base is 1000000.0 in mbridge and 10000 by the flags"),
        ({"num_key_value_heads": None}, {}, "num_query_groups is 8 in mbridge and 4 by the flags"),
        (
            {},
            {"_build_config": with_values(normalization="LayerNorm")},
            "normalization is LayerNorm in mbridge and RMS",
        ),
        ({}, {"_build_config": with_values(num_layers=3)}, "num_layers is 3 in mbridge and 2 by the flags"),
        (
            {},
            {"_get_transformer_layer_spec": lambda self, vp_stage=None: None},
            "Own of mbridge builds the model itself",
        ),
        ({}, {"_get_gptmodel_args": lambda self: {"scatter_embedding_sequence_parallel": False}}, "no flags"),
        (
            {},
            {"_get_gptmodel_args": lambda self: {**ENDS, "rotary_percent": 0.5}},
            "rotary_percent is 0.5 in mbridge and 1.0",
        ),
    ],
)
def test_a_model_that_flags_cannot_describe_is_refused(
    config: dict[str, Any], methods: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils.model.from_mbridge import settings

    own_bridge(monkeypatch, **methods)
    with pytest.raises(ValueError, match=message):
        settings({key: value for key, value in {**MIXTRAL, **config}.items() if value is not None})


def turned(method: str, ending: str) -> Any:
    """Return Mixtral's ``method`` with another order of rows in what it makes of parameters that end so."""

    def call(self: Any, name: str, given: Any, *more: Any) -> Any:
        from mbridge.models import MixtralBridge

        made = getattr(MixtralBridge, method)(self, name, given, *more)
        if not name.endswith(ending):
            return made
        if isinstance(made, torch.Tensor):
            return made.flip(0)
        return (made[0], made[1][::-1]) if isinstance(made, tuple) and isinstance(made[0], list) else made[::-1]

    return call


@pytest.mark.parametrize(
    ("method", "ending", "layout"),
    [
        ("_weight_to_mcore_format", "linear_qkv.weight", "QueryKeyValue"),
        ("_weight_to_mcore_format", "word_embeddings.weight", "Vocabulary"),
        ("_weight_split_across_tp", "linear_proj.weight", "RowParallel"),
        ("_weight_merge_across_tp", "experts.linear_fc1.weight0", "GateUp"),
        ("_weight_to_hf_format", "experts.linear_fc1.weight0", "GateUp"),
    ],
)
def test_weights_that_are_made_in_another_way_are_refused(
    method: str, ending: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slime.backends.megatron_utils.weights.maps.bridged import bridged_family

    own_bridge(monkeypatch, **{method: turned(method, ending)})
    bridged_family.cache_clear()
    with pytest.raises(ValueError, match=f"{ending.removesuffix('0')}.* of .* in a way that is not {layout}"):
        bridged_family("mixtral")
    bridged_family.cache_clear()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = Path(make_checkpoint(tmp_path_factory.mktemp("mixtral"), "mixtral", vocab_size=384))
    make_tokenizer(checkpoint)
    return checkpoint


def run(checkpoint: Path, folder: Path, name: str, *flags: str) -> Finished:
    """Train and save in ``folder``; a later run of the same folder continues."""
    words = f"""--save {folder}/save --load {folder}/save --save-interval 1 --save-hf {folder}/hf-{{rollout_id}}
        --custom-rm-path tests.support.rollout_hooks.every_other"""
    done = run_train([*rl_flags(checkpoint, sums_file(folder / "sums.jsonl")), *words.split(), *flags], folder / name)
    assert max(done.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert min(done.metric("train/grad_norm").values()) > 0
    return done


@pytest.mark.soak
def test_trainer_and_engine_agree(mixtral: Path, tmp_path: Path) -> None:
    """The second rollout is made with weights that the trainer has pushed."""
    done = run(mixtral, tmp_path, "run", "--num-rollout", "2")
    assert done.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}


def test_a_checkpoint_is_converted_there_and_back(mixtral: Path, tmp_path: Path) -> None:
    to_torch_dist(mixtral, tmp_path / "megatron")
    made = convert(Conversion(tmp_path / "megatron" / "release", tmp_path / "made", mixtral))
    assert differences(made, mixtral) == []


@pytest.mark.soak
def test_a_run_is_continued(mixtral: Path, tmp_path: Path) -> None:
    """From a checkpoint of Megatron that has the weights of the export; the engines then get changes alone."""
    run(mixtral, tmp_path, "first", "--num-rollout", "1")
    made = convert(Conversion(tmp_path / "save", tmp_path / "made", mixtral))
    assert differences(made, tmp_path / "hf-0") == []
    assert differences(made, mixtral) != []
    changes = f"""--num-rollout 3 --update-weight-transport disk --update-weight-disk-dir {tmp_path}/shared
        --update-weight-local-checkpoint-dir {tmp_path}/local --update-weight-mode delta"""
    second = run(mixtral, tmp_path, "second", *changes.split())
    assert second.metric("train/grad_norm").keys() == {1, 2}
    assert differences(tmp_path / "hf-1", tmp_path / "hf-0") != []
