"""The command line of an engine."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.arguments.passthrough import catalog
from slime.backends.sglang_utils import server_args
from slime.backends.sglang_utils.engine import EngineProcess
from slime.backends.sglang_utils.errors import EngineStartError
from slime.backends.sglang_utils.server_args import (
    EngineSpec,
    build_server_args,
    check_transport,
    flag_words,
    forwarded_fields,
    secret_fields,
)
from tests.support.arguments import run_args


def parse(command: list[str]) -> Namespace:
    """Read a command line as SGLang would, with a parser made from its argument list."""
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    parser = ArgumentParser(allow_abbrev=False)
    for r in catalog.records(catalog.SGLANG):
        options, common = r["options"], {"dest": r["dest"], "default": r["default"]}
        if r["action"] == "true":
            parser.add_argument(*options, action="store_true", dest=r["dest"])
        elif r["action"] == "tristate":
            parser.add_argument(
                *(o for o in options if not o.startswith("--no-")), action=BooleanOptionalAction, **common
            )
        else:
            kind = {"int": int, "float": float}.get(r["kind"], str)
            parser.add_argument(*options, nargs=r["nargs"], type=kind, **common)
    return parser.parse_args(command[3:])


def spec(**fields: Any) -> EngineSpec:
    defaults = {"rank": 0, "host": "127.0.0.1", "port": 15000, "nccl_port": 15001, "num_gpus": 1, "model_path": "/m"}
    return EngineSpec(**{**defaults, **fields})


def engine_args(**fields: Any) -> Namespace:
    """Parsed arguments once the cluster has turned out to have GPUs."""
    args = run_args()
    vars(args).update({"device_type": "cuda", **fields})
    return args


def test_what_slime_decides() -> None:
    got = parse(build_server_args(engine_args(trust_remote_code=True), spec(rank=3, host="10.0.0.4", num_gpus=4)))
    assert (got.model_path, got.host, got.port, got.nccl_port) == ("/m", "10.0.0.4", 15000, 15001)
    assert got.random_seed == 1234 + 3 * 8
    assert (got.tp_size, got.pp_size, got.nnodes, got.node_rank, got.base_gpu_id) == (4, 1, 1, 0, 0)
    assert got.trust_remote_code
    assert got.skip_server_warmup
    assert got.enable_metrics
    assert not got.enable_memory_saver


def test_remote_code_is_not_trusted_unless_asked() -> None:
    assert not parse(build_server_args(engine_args(trust_remote_code=False), spec())).trust_remote_code


def test_the_memory_saver_follows_offloading_on_cuda_only() -> None:
    def saver(**fields: Any) -> bool:
        return bool(parse(build_server_args(engine_args(**fields), spec())).enable_memory_saver)

    assert saver(offload_rollout=True)
    assert not saver(offload_rollout=False)
    assert not saver(offload_rollout=True, device_type="cpu")


def test_engines_that_release_their_graphs_have_none_that_cannot_be_released() -> None:
    """SGLang's default for prefill on CUDA, ``breakable``, raises NotImplementedError beside the memory saver."""

    def backend(spec_fields: dict[str, Any], **fields: Any) -> str | None:
        got: str | None = parse(
            build_server_args(engine_args(**fields), spec(**spec_fields))
        ).cuda_graph_backend_prefill
        return got

    assert backend({}, offload_rollout=True) == "disabled"
    assert backend({}, offload_rollout=False) is None  # SGLang's default stays where nothing is released
    assert backend({}, offload_rollout=True, device_type="cpu") is None
    assert backend({"offload": False}, offload_rollout=True) is None
    assert backend({"offload": False, "overrides": {"enable_memory_saver": True}}) == "disabled"
    # What was chosen holds.
    assert backend({}, offload_rollout=True, sglang_cuda_graph_backend_prefill="full") == "full"
    assert (
        backend({"overrides": {"cuda_graph_backend_prefill": "tc_piecewise"}}, offload_rollout=True) == "tc_piecewise"
    )


def test_an_engine_over_two_nodes() -> None:
    got = parse(
        build_server_args(engine_args(), spec(num_gpus=16, nnodes=2, node_rank=1, dist_init_addr="10.0.0.4:15002"))
    )
    assert (got.tp_size, got.nnodes, got.node_rank, got.dist_init_addr) == (16, 2, 1, "10.0.0.4:15002")


def test_pipeline_stages_divide_the_engine() -> None:
    got = parse(build_server_args(engine_args(sglang_pp_size=2), spec(num_gpus=8)))
    assert (got.tp_size, got.pp_size) == (4, 2)
    with pytest.raises(ValueError, match=r"engine of 8 GPUs.*--sglang-pp-size"):
        build_server_args(engine_args(sglang_pp_size=3), spec(num_gpus=8))
    got = parse(build_server_args(engine_args(), spec(num_gpus=8, overrides={"pp_size": 4})))
    assert (got.tp_size, got.pp_size) == (2, 4)


def test_a_flag_left_at_its_default_is_not_forwarded() -> None:
    assert forwarded_fields(engine_args(), catalog.records(catalog.SGLANG)) == {}


def test_flags_that_were_set_are_forwarded_in_every_form() -> None:
    args = engine_args(
        sglang_dtype="float32",
        sglang_mem_fraction_static=0.3,
        sglang_disable_overlap_schedule=True,
        sglang_attention_backend="torch_native",
        sglang_cuda_graph_bs_decode=[1, 2, 4],
        sglang_dllm_fdfo=False,
        sglang_preferred_sampling_params='{"temperature": 0.5}',
        sglang_json_model_override_args='{"max_position_embeddings": 64}',
        sglang_chat_template="-odd-",
        sglang_dp_size=2,
        sglang_ep_size=4,
    )
    got = parse(build_server_args(args, spec()))
    assert (got.dtype, got.mem_fraction_static, got.attention_backend) == ("float32", 0.3, "torch_native")
    assert got.disable_overlap_schedule
    assert got.cuda_graph_bs_decode == [1, 2, 4]
    assert got.dllm_fdfo is False
    assert got.preferred_sampling_params == '{"temperature": 0.5}'
    assert got.json_model_override_args == '{"max_position_embeddings": 64}'
    assert got.chat_template == "-odd-"
    assert (got.dp_size, got.ep_size) == (2, 4)


def test_fp16_runs_load_fp16() -> None:
    assert parse(build_server_args(engine_args(fp16=True), spec())).dtype == "float16"


@pytest.mark.parametrize(
    ("worker_type", "expected"),
    [
        ("prefill", {"disaggregation_mode": "prefill", "load_balance_method": "follow_bootstrap_room"}),
        ("decode", {"disaggregation_mode": "decode", "enable_hierarchical_cache": False}),
        ("encoder", {"encoder_only": True, "enable_hierarchical_cache": True}),
    ],
)
def test_workers_with_one_task(worker_type: str, expected: dict[str, Any]) -> None:
    args = engine_args(sglang_enable_hierarchical_cache=True)
    got = vars(parse(build_server_args(args, spec(worker_type=worker_type, bootstrap_port=9000))))
    assert {name: got[name] for name in expected} == expected
    assert got["disaggregation_bootstrap_port"] == (9000 if worker_type == "prefill" else 8998)


def test_only_prefill_and_decode_engines_carry_caches() -> None:
    args = engine_args(sglang_disaggregation_transfer_backend="nixl")
    for worker_type, expected in (("prefill", "nixl"), ("decode", "nixl"), ("regular", "mooncake")):
        got = parse(build_server_args(args, spec(worker_type=worker_type, bootstrap_port=9000)))
        assert got.disaggregation_transfer_backend == expected


def test_a_transport_whose_package_is_missing_is_said_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"nixl"}
    monkeypatch.setattr(server_args.importlib.util, "find_spec", lambda name: name if name in installed else None)
    nixl, mooncake = (engine_args(sglang_disaggregation_transfer_backend=name) for name in ("nixl", "mooncake"))
    check_transport(nixl, spec(worker_type="prefill"))
    check_transport(mooncake, spec())  # carries nothing
    check_transport(mooncake, spec(worker_type="decode", overrides={"disaggregation_transfer_backend": "nixl"}))
    for device_type, package in (("cuda", "mooncake-transfer-engine"), ("cpu", "mooncake-transfer-engine-non-cuda")):
        mooncake.device_type = device_type
        with pytest.raises(
            EngineStartError, match=rf"mooncake is not installed on \S+: pip install {package}, or choose"
        ):
            check_transport(mooncake, spec(worker_type="decode"))
    installed.clear()
    with pytest.raises(EngineStartError, match=r"pip install nixl, or choose mooncake"):
        check_transport(nixl, spec(worker_type="prefill"))


def test_a_transport_that_lacks_a_library_of_the_system_is_said_before_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libibverbs.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    args = engine_args(sglang_disaggregation_transfer_backend="mooncake_tcp")
    with pytest.raises(
        EngineStartError, match=r"cannot be loaded on \S+: ImportError: libibverbs\.so\.1: .*choose nixl"
    ):
        check_transport(args, spec(worker_type="prefill"))
    (package / "engine.py").write_text("")
    check_transport(args, spec(worker_type="prefill"))


def test_an_unknown_worker_type_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'verifier'"):
        build_server_args(engine_args(), spec(worker_type="verifier"))


def test_overrides_win_and_unknown_ones_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    args = engine_args(sglang_mem_fraction_static=0.3)
    given = {"mem_fraction_static": 0.7, "model_path": "/judge", "random_seed": 1}
    got = parse(build_server_args(args, spec(overrides=given)))
    assert (got.mem_fraction_static, got.model_path, got.random_seed) == (0.7, "/judge", 1)
    assert build_server_args(args, spec(overrides={"mem_fraction_statik": 0.7})) == build_server_args(args, spec())
    assert "SGLang has no argument mem_fraction_statik: the engine does without it" in caplog.text


def test_memory_of_groups_that_take_turns_with_the_trainer() -> None:
    """A frozen model's weights have to be kept somewhere: they are not sent again."""
    args = engine_args(offload_rollout=True)
    for fields, saver, backup in (
        ({}, True, False),
        ({"offload": False}, False, False),
        ({"offload": True, "update_weights": False}, True, True),
        ({"offload": False, "update_weights": False}, False, False),
        ({"offload": False, "overrides": {"enable_memory_saver": True}}, True, False),
    ):
        got = parse(build_server_args(args, spec(**fields)))
        assert (got.enable_memory_saver, got.enable_weights_cpu_backup) == (saver, backup), fields


def test_a_draft_model_that_releases_its_memory_keeps_a_copy_of_its_weights() -> None:
    def backup(of_group: dict[str, Any] | None = None, **fields: Any) -> bool:
        args = engine_args(sglang_speculative_algorithm="EAGLE", **fields)
        return bool(parse(build_server_args(args, spec(overrides=of_group))).enable_draft_weights_cpu_backup)

    assert backup(offload_rollout=True)
    assert not backup(offload_rollout=False)
    assert not backup({"speculative_algorithm": None}, offload_rollout=True)
    assert not backup(offload_rollout=True, device_type="cpu")


def test_only_the_trained_model_reports_its_experts() -> None:
    args = engine_args(use_rollout_routing_replay=True)
    assert parse(build_server_args(args, spec())).enable_return_routed_experts
    assert not parse(build_server_args(args, spec(update_weights=False))).enable_return_routed_experts


def test_the_key_is_kept_off_the_command_line() -> None:
    args = engine_args(sglang_api_key="s3cret", sglang_admin_api_key="adm1n")
    assert secret_fields(args) == {"api_key": "s3cret", "admin_api_key": "adm1n"}
    assert not any("s3cret" in word or "adm1n" in word for word in build_server_args(args, spec()))


def test_several_tokenizers_have_no_key_and_none_shows() -> None:
    args = engine_args(sglang_api_key="s3cret", sglang_admin_api_key="adm1n", sglang_tokenizer_worker_num=2)
    assert secret_fields(args) == {}
    assert not any("s3cret" in word or "adm1n" in word for word in build_server_args(args, spec()))


def test_several_tokenizers_do_not_serve_other_hosts(tmp_path: Path) -> None:
    args = engine_args(sglang_tokenizer_worker_num=2)
    engine = EngineProcess(args, rank=0, host="10.0.0.4", log_path=tmp_path / "engine.log")
    with pytest.raises(EngineStartError, match="--sglang-tokenizer-worker-num"):
        engine.start()


def test_a_whole_config_file_of_the_user_is_not_forwarded() -> None:
    assert not any("config" in word for word in build_server_args(engine_args(sglang_config="deploy.yaml"), spec()))


@pytest.mark.parametrize(
    ("record", "value", "words"),
    [
        ({"options": ["--x"], "action": "true", "default": False}, False, []),
        ({"options": ["--drop-cache"], "action": "false", "default": True}, False, ["--drop-cache"]),
        ({"options": ["--drop-cache"], "action": "false", "default": True}, True, []),
        ({"options": ["--x"], "action": "append", "default": None, "kind": "str", "nargs": None}, ["a", "b"],
         ["--x", "a", "--x", "b"]),
        ({"options": ["--x"], "action": "value", "default": None, "kind": "json", "nargs": None}, {"a": [1]},
         ['--x={"a": [1]}']),
        ({"options": ["-x", "--x-long"], "action": "value", "default": 1, "kind": "int", "nargs": None}, 2,
         ["--x-long=2"]),
        ({"options": ["--x"], "action": "value", "default": 1, "kind": "int", "nargs": None}, None, []),
    ],
)  # fmt: skip
def test_words_of_one_flag(record: dict[str, Any], value: Any, words: list[str]) -> None:
    assert flag_words(record, value) == words


def test_engines_that_get_adapters_hold_others_too() -> None:
    given = {"lora_rank": 8, "lora_sync": "adapter", "lora_target_modules": ["q_proj", "v_proj"]}
    got = parse(build_server_args(engine_args(**given), spec()))
    assert (got.enable_lora, got.max_lora_rank, got.lora_target_modules) == (True, 8, ["q_proj", "v_proj"])
    more = {
        "sglang_lora_paths": ["judge=/j"], "sglang_max_lora_rank": 32, "sglang_lora_target_modules": ["o_proj"],
    }  # fmt: skip
    got = parse(build_server_args(engine_args(**given, **more), spec()))
    assert (got.lora_paths, got.max_lora_rank) == (["judge=/j"], 32)
    assert got.lora_target_modules == ["o_proj", "q_proj", "v_proj"]
    frozen = parse(build_server_args(engine_args(**given), spec(update_weights=False)))
    assert (frozen.enable_lora, frozen.max_lora_rank) == (False, None)
