"""Variables in the environment of engine processes, and only theirs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path

import pytest

from slime.backends.sglang_utils.environment import (
    CPU_STANDINS,
    DEFAULTS,
    ENGINE_PLUGIN,
    core_binding,
    engine_environment,
)


def paths(env: dict[str, str]) -> list[str]:
    return env["PYTHONPATH"].split(os.pathsep)


def test_cpu_engines_see_the_stand_ins_and_the_plugin() -> None:
    env = engine_environment(device_type="cpu", base={"PYTHONPATH": "/mine"})
    assert paths(env) == [str(ENGINE_PLUGIN), str(CPU_STANDINS), "/mine"]
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == ""
    assert (env["UCX_TLS"], env["MOONCAKE_PROTOCOL"]) == ("tcp", "tcp")  # nothing else carries caches from host to host
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in env


def test_cuda_engines_see_the_plugin_but_no_stand_ins() -> None:
    env = engine_environment(device_type="cuda", base={"CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "8"})
    assert paths(env) == [str(ENGINE_PLUGIN)]
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert env["OMP_NUM_THREADS"] == "8"
    assert not {"SGLANG_USE_CPU_ENGINE", "UCX_TLS", "UCX_MODULES", "MOONCAKE_PROTOCOL"} & env.keys()


def test_own_values_win() -> None:
    assert engine_environment(device_type="cuda", base={}).items() >= DEFAULTS.items()
    env = engine_environment(
        device_type="cpu", base={"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "false", "OMP_NUM_THREADS": "4"}
    )
    assert env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "false"
    assert env["OMP_NUM_THREADS"] == "4"


def test_the_trainers_allocator_settings_do_not_reach_engines() -> None:
    base = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": "x", "HOME": "/h"}
    env = engine_environment(device_type="cuda", base=base)
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & set(env)
    assert env["HOME"] == "/h"
    assert "PYTORCH_ALLOC_CONF" in base


def test_a_users_list_of_plugins_keeps_ours() -> None:
    assert "SGLANG_PLUGINS" not in engine_environment(device_type="cpu", base={})
    assert engine_environment(device_type="cpu", base={"SGLANG_PLUGINS": "a,b"})["SGLANG_PLUGINS"] == "a,b,slime"


def test_temporary_files_go_to_the_engines_own_directory(tmp_path: Path) -> None:
    env = engine_environment(device_type="cuda", base={"USER": "u"}, scratch=tmp_path)
    assert env["TMPDIR"] == str(tmp_path)
    assert not env["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("tp_size", "cores", "expected"),
    [
        (2, [0, 1], "0|1"),
        (2, [0, 1, 2, 3], "0,1|2,3"),
        (3, [4, 5, 6, 7], "4|5|6"),
        (4, [0, 1], "0|1|0|1"),
        (2, [7], "7|7"),
    ],
)
def test_cores_are_shared_out_to_ranks(tp_size: int, cores: list[int], expected: str) -> None:
    assert core_binding(tp_size, cores) == expected
    env = engine_environment(device_type="cpu", tp_size=tp_size, base={}, cores=cores)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == expected


def test_this_process_sees_neither() -> None:
    for name in ("sgl_kernel", "triton", "torchvision", "slime_engine_plugin"):
        found = importlib.util.find_spec(name)
        assert found is None or not str(found.origin).startswith((str(CPU_STANDINS), str(ENGINE_PLUGIN)))


def test_the_plugin_is_found_through_its_entry_point() -> None:
    found = [e for d in importlib.metadata.distributions(path=[str(ENGINE_PLUGIN)]) for e in d.entry_points]
    assert [(e.group, e.name, e.value) for e in found] == [
        ("sglang.srt.plugins", "slime", "slime_engine_plugin:register")
    ]
