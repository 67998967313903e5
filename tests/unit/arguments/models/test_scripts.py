"""The scripts of all models, against a table that was written down apart from the one they are generated from."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from slime.arguments.command_line import read_words
from slime.models.facts import models
from tests.support.model_scripts import SCRIPTS, bash, source
from tools import gen_model_scripts

TABLE = Path(__file__).parents[3] / "data" / "arguments" / "model_table.tsv"
ROWS = {
    row["script"]: row
    for row in csv.DictReader(
        (line for line in TABLE.read_text().splitlines() if not line.startswith("#")), delimiter="\t"
    )
}
COMMON = {
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
}
MOE = {"moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_dtype": "fp32", "moe_aux_loss_coeff": 0}
# Said by every script of a mixture of experts, by the table only of some; `allgather` is turned into it in any case.
HARMLESS = {"moe_token_dispatcher_type": "alltoall"}


def _value(text: str):
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            pass
    return {"True": True, "False": False, "None": None}.get(text, text)


def expected(row: dict[str, str]) -> dict[str, object]:
    """The attributes that ``row`` of the table stands for."""
    said = {
        **COMMON,
        "num_layers": int(row["layers"]),
        "hidden_size": int(row["hidden"]),
        "ffn_hidden_size": int(row["ffn"]),
        "num_attention_heads": int(row["heads"]),
        "vocab_size": int(row["vocab"]),
        "norm_epsilon": float(row["eps"]),
        "rotary_base": int(row["rope_base"]),
        "rotary_percent": float(row["rope_part"]),
        "untie_embeddings_and_output_weights": row["untied"] == "yes",
        "qk_layernorm": row["qk_norm"] == "yes",
    }
    if row["groups"] != "-":
        said |= {"group_query_attention": True, "num_query_groups": int(row["groups"])}
    if row["head"] != "-":
        said["kv_channels"] = int(row["head"])
    if row["experts"] != "-":
        dense, layers = int(row["dense"]), int(row["layers"])
        said |= MOE | {
            "num_experts": int(row["experts"]),
            "moe_router_topk": int(row["topk"]),
            "moe_ffn_hidden_size": int(row["expert_ffn"]),
            "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        }
        if row["shared_ffn"] != "-":
            said["moe_shared_expert_intermediate_size"] = int(row["shared_ffn"])
    for word in (row["other"] or "").split():
        name, _, value = word.partition("=")
        said[name] = value.split(":") if name == "spec" else _value(value)
    if "kv_lora_rank" in said:
        said["multi_latent_attention"] = True
    return said


@pytest.fixture(scope="session")
def scripts() -> dict[str, list[str]]:
    """``MODEL_ARGS`` of every script, all sourced by one bash."""
    loop = 'for name in *.sh; do source "$name"; printf "%s\\0" "$name" "${MODEL_ARGS[@]}"; printf "\\1"; done'
    records = [record.split("\0")[:-1] for record in bash(loop, SCRIPTS).split("\1")[:-1]]
    return {name.removesuffix(".sh"): words for name, *words in records}


def test_there_is_one_script_per_model(scripts):
    assert sorted(scripts) == sorted(ROWS) == sorted(models())


@pytest.mark.parametrize("name", ROWS)
def test_attributes(name, scripts, parser, flags):
    given, _ = read_words(parser, scripts[name])
    default = {flag.dest: flag.default for flag in flags}
    said = expected(ROWS[name])
    for attribute, value in said.items():
        seen = given.get(attribute, default[attribute])
        if attribute == "kv_channels" and seen is None:
            seen = given["hidden_size"] // given["num_attention_heads"]
        assert seen == value, attribute
    for attribute, seen in given.items():
        if attribute in said:
            continue
        allowed = {default[attribute], HARMLESS.get(attribute, default[attribute])}
        if attribute == "kv_channels":
            allowed = {given["hidden_size"] // given["num_attention_heads"]}
        assert seen in allowed, f"{attribute} {seen} is not in the table"


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if "spec=" in (row["other"] or "")])
def test_the_second_and_third_element_are_the_module_and_the_function_of_the_specification(name, scripts):
    module, function = dict(word.split("=") for word in ROWS[name]["other"].split())["spec"].split(":")
    assert scripts[name][:3] == ["--spec", module, function]


def test_a_script_works_from_anywhere_and_leaves_nothing_but_model_args(tmp_path):
    (tmp_path / "0-3+1-58").touch()  # what [0]*3+[1]*58 without quotes would become
    commands = 'before="$(compgen -v)"; source "{}/{}.sh"; comm -13 <(sort <<<"$before") <(compgen -v | sort)'
    for name in ("deepseek-v3", "qwen3-4B", "glm4-9B"):
        left = set(bash(commands.format(SCRIPTS, name), tmp_path).split())
        assert left - {"BASH_LINENO", "PIPESTATUS", "_", "before"} == {"MODEL_ARGS"}
    assert "[0]*3+[1]*58" in source("deepseek-v3", tmp_path)


@pytest.mark.parametrize("name", ["qwen3-1.7B", "qwen3-4B", "qwen3-8B", "qwen3-30B-A3B", "qwen3-235B-A22B"])
def test_the_rotary_base_can_be_set(name, scripts):
    changed = [
        "12345" if before == "--rotary-base" else word
        for before, word in zip(["", *scripts[name]], scripts[name], strict=False)
    ]
    assert source(name, MODEL_ARGS_ROTARY_BASE="12345") == changed


def test_the_number_of_layers_of_deepseek_v3_can_be_set(parser):
    given, _ = read_words(parser, source("deepseek-v3", MODEL_ARGS_NUM_LAYERS="4"))
    assert given["num_layers"] == 4
    assert given["moe_layer_freq"] == [0, 0, 0, 1]


def test_a_script_changed_by_hand_is_found(tmp_path):
    for path in SCRIPTS.glob("*.sh"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    assert gen_model_scripts.differences(tmp_path) == []
    (tmp_path / "qwen3-4B.sh").write_text((tmp_path / "qwen3-4B.sh").read_text().replace("2560", "2561"))
    (tmp_path / "mine.sh").touch()
    assert gen_model_scripts.differences(tmp_path) == [
        f"{tmp_path}/qwen3-4B.sh does not match slime/models/facts.yaml",
        f"{tmp_path}/mine.sh has no entry in facts.yaml",
    ]


def test_the_scripts_are_those_the_table_makes():
    assert gen_model_scripts.differences() == []
