"""Modules of slime <= 0.3.1 that are no files: what can be imported from them, and what that does."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import math
import pickle
import subprocess
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from slime.compat import old_paths
from slime.utils import distributed_utils, memory_utils
from slime.utils.misc import load_function
from tests.support.http_stub import http_stub
from tests.support.imports import watch

ROOT = Path(__file__).parents[3]
with (ROOT / "tests" / "data" / "old_paths.tsv").open(encoding="utf-8", newline="") as file:
    ROWS = [(row["path"], row["home"]) for row in csv.DictReader(file, delimiter="\t")]
REAL = (  # modules that are files here, with what users import from them
    ("slime.utils.distributed_utils", "init_process_group get_gloo_group init_gloo_group distributed_masked_whiten"),
    ("slime.utils.memory_utils", "clear_memory available_memory print_memory"),
    ("slime.utils.external_utils.typer_utils", "dataclass_cli"),
)


BELOW = ("slime.first_look.data", "slime.planner.render", "slime.utils.external_utils.command_utils")


@pytest.mark.parametrize("path", [*old_paths.ALIASES, *BELOW])
def test_a_module_that_moved_is_one_object_under_both_paths(path: str) -> None:
    """A patch of either takes effect; modules below a moved package are not loaded a second time."""
    home = old_paths.home_of(path)
    assert importlib.import_module(path) is importlib.import_module(home)
    if path in BELOW:  # in a process that imports the old path first, too
        code = f"import slime, importlib as i; print(i.import_module({path!r}) is i.import_module({home!r}))"
        run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert run.stdout.split() == ["True"], run.stderr


@pytest.mark.parametrize(("path", "home"), ROWS, ids=[path for path, _ in ROWS])
def test_an_old_name_is_the_thing_itself(path: str, home: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_function(path) is load_function(home)


@pytest.mark.parametrize(
    "entry",
    [(m, n, h) for table in (old_paths.PUBLIC, old_paths.OLD) for m, names in table.items() for n, h in names.items()],
)
def test_every_entry_of_the_tables_has_its_home(entry: tuple[str, str, str]) -> None:
    module, name, home = entry
    if home.startswith("sglang."):
        spec = importlib.util.find_spec("sglang")
        if spec is None:
            pytest.skip("SGLang is not installed")
        # importing it takes seconds: its source is looked at instead
        sources = Path(spec.submodule_search_locations[0]).joinpath("srt").rglob("*.py")  # type: ignore[index]
        assert any(f" {name}" in source.read_text(encoding="utf-8") for source in sources if source.stem != "__init__")
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize(("module", "names"), REAL)
def test_modules_that_are_files(module: str, names: str) -> None:
    assert [name for name in names.split() if not hasattr(importlib.import_module(module), name)] == []


@pytest.mark.parametrize("module", sorted({*old_paths.PUBLIC, *old_paths.OLD, *old_paths.LACKING}))
def test_no_file_is_hidden_behind_an_entry(module: str) -> None:
    path = ROOT.joinpath(*module.split("."))
    assert not path.with_suffix(".py").exists()
    assert not path.is_dir()


@pytest.mark.parametrize("module", sorted(old_paths.LACKING))
def test_what_is_lacking_says_so(module: str) -> None:
    for name in (module, f"{module}.anything"):
        with pytest.raises(ImportError, match=r"this version of slime lacks \w+"):
            importlib.import_module(name)


def test_all_forms_of_import() -> None:
    import slime.backends.megatron_utils.update_weight.update_weight_from_tensor as whole
    import slime.ray.actor_group
    from slime.backends.megatron_utils import megatron_to_hf
    from slime.ray.actor_group import RayTrainGroup
    from slime.utils import flops_utils

    assert slime.ray.actor_group.RayTrainGroup is RayTrainGroup
    assert isinstance(whole, ModuleType)
    assert callable(megatron_to_hf.convert_to_hf)
    assert "calculate_fwd_flops" in flops_utils.__all__
    assert pickle.loads(pickle.dumps(RayTrainGroup)) is RayTrainGroup
    assert pickle.loads(b"cslime.ray.actor_group\nRayTrainGroup\n.") is RayTrainGroup  # by the old path
    with pytest.raises(AttributeError, match=r"'slime\.ray\.actor_group' has no attribute 'Nothing'; it has RayTrain"):
        slime.ray.actor_group.Nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'slime\.utils\.no_such_module'"):
        importlib.import_module("slime.utils.no_such_module")


def test_plugins_of_a_process_that_has_not_imported_slime_find_them_too() -> None:
    program = "import slime_plugins.models.qwen_gdn_backend"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "lacks a module for this choice: --qwen-gdn-backend makes it" in done.stderr


def test_modules_cost_nothing_until_a_name_is_used() -> None:
    light = [module for module in old_paths.PUBLIC if not module.startswith(("slime.ray", "slime.backends"))]
    found = watch("\n".join(f"import {module}" for module in light), ["torch", "ray", "transformers", "megatron"])
    assert found.offenders == {}, found.explain()


ARGS = Namespace(
    num_layers=2, hidden_size=4, num_attention_heads=4, num_query_groups=2, group_query_attention=True, kv_channels=1,
    vocab_size=3, padded_vocab_size=None, num_experts=2, ffn_hidden_size=6, swiglu=True, multi_latent_attention=False,
    moe_layer_freq=0, moe_router_topk=1,
)  # fmt: skip


def test_convert_to_hf() -> None:
    convert = load_function("slime.backends.megatron_utils.megatron_to_hf.convert_to_hf")
    qkv = torch.arange(8.0)[:, None].expand(8, 4)  # per group two queries, a key and a value
    found = dict(convert(ARGS, "qwen3config", "module.module.decoder.layers.1.self_attention.linear_qkv.weight", qkv))
    at = "model.layers.1.self_attn."
    rows = {name.removeprefix(at): tensor[:, 0].tolist() for name, tensor in found.items()}
    assert rows == {"q_proj.weight": [0, 1, 4, 5], "k_proj.weight": [2, 6], "v_proj.weight": [3, 7]}
    embedding = torch.arange(20.0).view(5, 4)
    [(name, cut)] = convert(ARGS, "llama", "embedding.word_embeddings.weight", embedding, quantization_config=None)
    assert name == "model.embed_tokens.weight"
    assert torch.equal(cut, embedding[:3])
    expert = dict(convert(ARGS, "qwen3moe", "decoder.layers.0.mlp.experts.linear_fc1.weight1", embedding[:4]))
    assert [*expert] == [f"model.layers.0.mlp.experts.1.{x}_proj.weight" for x in ("gate", "up")]
    assert [(n, t.shape) for n, t in convert(ARGS, "qwen3", "model.visual.x", cut)] == [("model.visual.x", cut.shape)]
    described = {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.0.self_attn"]}
    for layer, method in ((0, None), (1, "_scale")):
        stored = dict(
            convert(ARGS, "qwen3", f"decoder.layers.{layer}.self_attention.linear_qkv.weight", qkv, described)
        )
        parts = [f"{p}_proj.weight{suffix}" for p in "qkv" for suffix in ("", *([method] if method else []))]
        assert [*stored] == [f"model.layers.{layer}.self_attn.{part}" for part in parts]
    assert stored["model.layers.1.self_attn.q_proj.weight_scale"].tolist() == [torch.tensor(5.0 / 448).item()]
    assert stored["model.layers.1.self_attn.q_proj.weight"][:, 0].tolist() == [0, 88, 352, 448]  # 89.6 lies between
    with pytest.raises(ValueError, match="quantization 'awq' is not available"):
        convert(ARGS, "llama", "output_layer.weight", embedding, {"quant_method": "awq"})
    with pytest.raises(ValueError, match=r"has no rule for the parameter 'decoder\.layers\.0\.nothing'"):
        convert(ARGS, "llama", "module.decoder.layers.0.nothing", embedding)
    with pytest.raises(ValueError, match="stores the experts of a layer in one tensor"):
        convert(ARGS, "qwen3_5_moe", "decoder.layers.0.mlp.experts.linear_fc1.weight1", embedding[:4])


def test_converters_of_one_family() -> None:
    from slime.backends.megatron_utils.megatron_to_hf.qwen2 import convert_qwen2_to_hf
    from slime.backends.megatron_utils.megatron_to_hf.qwen3moe import convert_qwen3moe_to_hf

    at, bias = "module.module.decoder.layers.0.", torch.arange(8.0)
    assert len(convert_qwen2_to_hf(ARGS, f"{at}self_attention.linear_qkv.bias", bias)) == 3  # of Qwen2
    [(name, _)] = convert_qwen2_to_hf(ARGS, f"{at}self_attention.q_layernorm.weight", bias)  # of Qwen3
    assert name == "model.layers.0.self_attn.q_norm.weight"
    [(name, _)] = convert_qwen3moe_to_hf(ARGS, f"{at}mlp.router.weight", bias)
    assert name == "model.layers.0.mlp.gate.weight"
    remove_padding = load_function("slime.backends.megatron_utils.megatron_to_hf.remove_padding")
    assert remove_padding("module.module.output_layer.weight", torch.zeros(5, 2), 3).shape == (3, 2)
    assert remove_padding("decoder.final_layernorm.weight", torch.zeros(5), 3).shape == (5,)


def test_flops_of_a_forward_pass() -> None:
    calculate = load_function("slime.utils.flops_utils.calculate_fwd_flops")
    args = Namespace(**{**vars(ARGS), "num_experts": None, "padded_vocab_size": 3})
    # per token and layer: q, k, v 2*4*(4+2*2); out 2*4*4; gated MLP 6*4*6; head once 2*4*3; attention 2*4 per pair/2
    per_token, pairs = 2 * (64 + 32 + 144) + 24, 2 * 4 * 2
    assert calculate([3, 5], args) == per_token * 8 + pairs * (9 + 25)


def test_statistics_and_prefixes() -> None:
    from slime.observability.metric_utils import compute_statistics, dict_add_prefix

    assert compute_statistics([4.0, 1.0, 2.0, 3.0]) == {"mean": 2.5, "median": 2.5, "max": 4.0, "min": 1.0}
    assert compute_statistics([]) == {}
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}


@pytest.mark.slow
def test_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    memory_utils.clear_memory(clear_host_memory=True)
    found = memory_utils.print_memory("after a step", clear_before_print=True)
    assert found.keys() == {"gpu", "total_GB", "free_GB", "used_GB", "allocated_GB", "reserved_GB"}
    assert 0 < found["free_GB"] <= found["total_GB"]  # type: ignore[operator]
    assert "memory after a step: {'gpu'" in caplog.text


def test_a_group_beside_none(tmp_path: Path) -> None:
    import torch.distributed as dist

    with pytest.raises(RuntimeError, match="call init_gloo_group"):
        distributed_utils.get_gloo_group()
    with pytest.raises(ValueError, match="either store or init_method"):
        distributed_utils.init_process_group("gloo")
    group = distributed_utils.init_process_group(
        backend="gloo", init_method=f"file://{tmp_path / 'store'}", world_size=1, rank=0, group_name="mine"
    )
    total = torch.tensor([3.0])
    dist.all_reduce(total, group=group)
    assert total.item() == 3.0
    values = torch.tensor([1.0, 2.0, 3.0, 50.0])
    white = distributed_utils.distributed_masked_whiten(values, torch.tensor([1, 1, 1, 0]), process_group=group)
    deviation = math.sqrt(1.0 + 1e-8)  # unbiased, of 1, 2, 3
    assert white.tolist() == pytest.approx([(v - 2.0) / deviation for v in values.tolist()])
    kept = distributed_utils.distributed_masked_whiten(values, torch.ones(4), group, False)
    assert kept.mean().item() == pytest.approx(values.mean().item())
    dist.destroy_process_group(group)


async def test_engines_are_aborted_until_they_are_idle() -> None:
    from slime.backends.sglang_utils.server_control import abort_server_until_idle, abort_servers_until_idle

    left = {"/v1/loads": [2, 1, 0]}
    aborts = []

    def answer(seen: object) -> tuple[int, object]:
        path = seen.path.partition("?")[0]  # type: ignore[attr-defined]
        if path == "/abort_request":
            aborts.append(seen)
            return 200, {}
        waiting = left["/v1/loads"]
        return 200, {"loads": [{"num_running_reqs": waiting.pop(0) if len(waiting) > 1 else waiting[0]}]}

    with http_stub(answer) as server:
        await abort_servers_until_idle([server.url], interval_s=0.01)
        assert len(aborts) == 3
        left["/v1/loads"] = [5]
        with pytest.raises(TimeoutError, match=r"still holds 5 requests after 0\.02 s"):
            await abort_server_until_idle(server.url, interval_s=0.01, deadline_s=0.02)


def test_actors_find_where_to_meet() -> None:
    from slime.ray.ray_actor import RayActor

    class Mine(RayActor):
        def __init__(self) -> None:
            self.master_addr, self.master_port = self._get_current_node_ip_and_free_port(
                start_port=21000, consecutive=2
            )

    address, port = Mine().get_master_addr_and_port()
    assert address.count(".") == 3 or ":" in address
    assert port >= 21000
