"""Launch helpers: which words reach the program, with which variables, and where."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.launch import command_utils
from slime.utils.misc import exec_command
from tests.support.imports import ROOT

RECORD = """
import json, os, sys
json.dump({"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}, open(os.environ["RECORD"], "w"))
sys.exit(int(os.environ.get("STATUS", "0")))
"""
FAKE_RAY = """#!/bin/sh
echo "$@" > "$RECORD.ray"
while [ "$1" != -- ]; do [ "$1" = --runtime-env-json ] && echo "$2" > "$RECORD.runtime"; shift; done
shift
cd /
exec "$@"
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """``execute_train`` in a repository of a program that writes down what it got."""
    repository = tmp_path / "repository"
    (repository / "scripts" / "models").mkdir(parents=True)
    (repository / "train.py").write_text(RECORD)
    (repository / "scripts" / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 2 --name 'a b')\n")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (tmp_path / "bin" / "ray").write_text(FAKE_RAY)
    for program in (python, tmp_path / "bin" / "ray"):
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    record = tmp_path / "record.json"
    monkeypatch.setattr(command_utils, "repo_base_dir", repository)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("RECORD", str(record))
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "SLIME_DRY_RUN", "SLURM_JOB_NUM_NODES", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SLIME_SCRIPT_EXTERNAL_RAY", "SLIME_SCRIPT_ENABLE_RAY_SUBMIT"):
        monkeypatch.delenv(name, raising=False)

    def call(train_args="", **more):
        command_utils.execute_train(train_args, 4, more.pop("megatron_model_type", "tiny"), **more)
        return json.loads(record.read_text()) if record.exists() else None

    return call


def test_flags_of_the_script_come_last_and_win(run, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    got = run("""--lr 1e-6 --train-env-vars '{"A": "1 2"}' --wandb-key ${SECRET} """)
    assert got["argv"] == [
        "--num-gpus-per-node", "4", "--num-layers", "2", "--name", "a b", "--lr", "1e-6", "--train-env-vars",
        '{"A": "1 2"}', "--wandb-key", "s3cret",
    ]  # fmt: skip


def test_without_a_model(run):
    assert run("--x", megatron_model_type=None)["argv"] == ["--num-gpus-per-node", "4", "--x"]


def test_variables(run, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    config = command_utils.ExecuteTrainConfig(cuda_core_dump=True, extra_env_vars="A=1 B='2 3'")
    env = run("", extra_env_vars={"A": "9"}, config=config, megatron_path="/Megatron-LM")["env"]
    assert env["PYTHONPATH"] == f"{tmp_path / 'repository'}:/Megatron-LM:/mine"
    assert (env["A"], env["B"], env["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"]) == ("9", "2 3", "1")
    with pytest.raises(ValueError, match="expected NAME=VALUE, got 'oops'"):
        run("", config=command_utils.ExecuteTrainConfig(extra_env_vars="oops"))


def test_a_failed_run_raises_its_status(run, monkeypatch):
    monkeypatch.setenv("STATUS", "7")
    with pytest.raises(RuntimeError, match=r"train\.py exited with 7"):
        run("")


def test_an_interrupted_run_may_clean_up(tmp_path):
    (tmp_path / "train.py").write_text("""
import pathlib, time
try:
    pathlib.Path("started").touch()
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    pathlib.Path("cleaned").touch()
""")
    script = """
import pathlib
from slime.launch import command_utils
command_utils.repo_base_dir = pathlib.Path(".").resolve()
command_utils.execute_train("", 1, None)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SL"))}
    environment["PYTHONPATH"] = str(ROOT)
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, start_new_session=True, env=environment, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, error = process.communicate(timeout=30)
    assert (tmp_path / "cleaned").exists()
    assert error.decode().splitlines()[-1] == "KeyboardInterrupt"


def test_what_is_not_there(run, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no .*models/huge\.sh"):
        run("", megatron_model_type="huge")
    with pytest.raises(FileNotFoundError, match=r"no program .*train_more\.py"):
        run("", train_script="train_more.py")
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize(
    ("name", "value", "address"),
    [
        ("RAY_API_SERVER_ADDRESS", "http://head:1", "http://head:1"),
        ("RAY_ADDRESS", "https://head:2", "https://head:2"),
        ("SLIME_SCRIPT_EXTERNAL_RAY", "1", "http://127.0.0.1:8265"),
    ],
)
def test_with_a_dashboard_the_run_is_a_job_of_that_cluster(run, monkeypatch, tmp_path, name, value, address):
    monkeypatch.setenv(name, value)
    got = run("--lr 1", extra_env_vars={"A": "it's"})
    assert (tmp_path / "record.json.ray").read_text().startswith(f"job submit --address {address} --runtime-env-json ")
    runtime = json.loads((tmp_path / "record.json.runtime").read_text())
    assert runtime == {"env_vars": {"PYTHONPATH": str(tmp_path / "repository"), "A": "it's"}}
    assert got["cwd"] == os.getcwd()  # though the job began elsewhere
    assert got["argv"][-4:] == ["--name", "a b", "--lr", "1"]


def test_a_dry_run_is_never_a_job(run, monkeypatch, tmp_path):
    monkeypatch.setenv("SLIME_DRY_RUN", "1")
    monkeypatch.setenv("RAY_ADDRESS", "http://head:8265")
    config = command_utils.ExecuteTrainConfig(num_nodes=16)
    assert run("--lr 1", config=config)["argv"][-3:] == ["--lr", "1", "--dry-run"]
    assert not (tmp_path / "record.json.ray").exists()


def test_several_nodes_need_a_cluster(run, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    with pytest.raises(ValueError, match="2 nodes need a Ray cluster"):
        run("")
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert run("")["argv"][:2] == ["--num-gpus-per-node", "4"]


def test_the_submission_can_be_turned_off_and_secrets_are_not_printed(run, monkeypatch, capsys):
    monkeypatch.setenv("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "false")
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    called = []
    assert run("--wandb-key ${WANDB_API_KEY}", before_ray_job_submit=lambda: called.append(1)) is None
    assert called == [1]
    printed = capsys.readouterr().out
    assert "--wandb-key ${WANDB_API_KEY}" in printed
    assert "s3cret" not in printed


def test_a_checkpoint_to_convert_becomes_a_link(tmp_path, capsys):
    source = tmp_path / "models" / "Tiny"
    source.mkdir(parents=True)
    arguments = {"model_name": "Tiny", "megatron_model_type": "tiny", "num_gpus_per_node": 8}
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        command_utils.convert_checkpoint(**arguments, dir_dst=str(tmp_path), hf_checkpoint=str(source))
    (source / "config.json").write_text("{}")
    command_utils.convert_checkpoint(**arguments, dir_dst=str(tmp_path), hf_checkpoint=str(source))
    target = tmp_path / "Tiny_torch_dist"
    assert target.resolve() == source.resolve()
    (target / "config.json").write_text('{"kept": 1}')
    command_utils.convert_checkpoint(**arguments, dir_dst=str(tmp_path), hf_checkpoint="/elsewhere")
    assert "exists already" in capsys.readouterr().out
    assert (source / "config.json").read_text() == '{"kept": 1}'


def test_a_link_to_something_that_has_gone_is_replaced(tmp_path):
    (tmp_path / "Tiny_torch_dist").symlink_to(tmp_path / "gone")
    (tmp_path / "config.json").write_text("{}")
    command_utils.convert_checkpoint("Tiny", "tiny", 8, dir_dst=str(tmp_path), hf_checkpoint=str(tmp_path))
    assert (tmp_path / "Tiny_torch_dist" / "config.json").exists()


def test_data_sets_come_from_the_hub_by_name(monkeypatch):
    lines = []
    monkeypatch.setattr(command_utils, "exec_command", lines.append)
    command_utils.hf_download_dataset("zhuzilin/dapo-math-17k", "/it's data")
    program, *words = shlex.split(lines[0])
    assert Path(program).name == "hf"
    assert words == [
        "download", "--repo-type", "dataset", "zhuzilin/dapo-math-17k", "--local-dir", "/it's data/dapo-math-17k",
    ]  # fmt: skip
    for name in ("dapo-math-17k", "a/b/c", "/b", "a/"):
        with pytest.raises(ValueError, match="owner/name"):
            command_utils.hf_download_dataset(name)
    monkeypatch.setattr(command_utils.shutil, "which", lambda *a, **k: None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        command_utils.hf_download_dataset("a/b")


def test_wandb_flags(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert command_utils.get_default_wandb_args("train_it.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("GITHUB_COMMIT_NAME", "abc")
    words = command_utils.get_default_wandb_args("/x/geo3k/run.py", run_name_prefix="ci", run_id="7").split()
    assert words == [
        "--use-wandb", "--wandb-project", "slime-geo3k_run", "--wandb-group", "ci_7_abc", "--wandb-key",
        "${WANDB_API_KEY}", "--disable-wandb-random-suffix",
    ]  # fmt: skip
    monkeypatch.delenv("GITHUB_COMMIT_NAME")
    words = command_utils.get_default_wandb_args("/x/geo3k/train_it.py").split()
    assert words[2] == "slime-train_it"
    assert re.fullmatch(r"\d{6}-\d{6}-\d{3}", words[4])


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("TRUE", True), ("0", False), ("False", False)])
def test_switches(monkeypatch, value, expected):
    monkeypatch.setenv("SLIME_TEST_SWITCH", value)
    assert command_utils.get_bool_env_var("SLIME_TEST_SWITCH") is expected


def test_switches_by_default_and_wrong(monkeypatch):
    monkeypatch.delenv("SLIME_TEST_SWITCH", raising=False)
    assert command_utils.get_bool_env_var("SLIME_TEST_SWITCH") is False
    assert command_utils.get_bool_env_var("SLIME_TEST_SWITCH", "true") is True
    monkeypatch.setenv("SLIME_TEST_SWITCH", "yes")
    with pytest.raises(ValueError, match="SLIME_TEST_SWITCH must be true, 1, false or 0, got 'yes'"):
        command_utils.get_bool_env_var("SLIME_TEST_SWITCH")


def test_temporary_files(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = (Path(command_utils.save_to_temp_file("a: é\n", ext)) for ext in ("yaml", ".yaml"))
    assert first != second
    assert {p.suffix for p in (first, second)} == {".yaml"}
    assert first.read_text(encoding="utf-8") == "a: é\n"
    assert stat.S_IMODE(first.stat().st_mode) == 0o600


def test_nvlink(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    program = tmp_path / "nvidia-smi"
    for table, expected in (("GPU0 X NV18\nGPU1 NV18 X", True), ("GPU0 X PHB", False)):
        program.write_text(f"#!/bin/sh\necho '{table}'\n")
        program.chmod(0o755)
        assert command_utils.check_has_nvlink() is expected
    monkeypatch.setattr(command_utils.shutil, "which", lambda name: None)
    assert command_utils.check_has_nvlink() is False


def test_commands_are_run_as_misc_runs_them(capsys):
    for run in (exec_command, command_utils.exec_command):
        assert run("echo $((1+2))", capture_output=True) == "3\n"
        with pytest.raises(RuntimeError, match="command exited with 3: exit 3"):
            run("exit 3")
    one, other = (line for line in capsys.readouterr().out.splitlines() if "echo" in line)
    assert one == other


def test_a_dry_run_prepares_nothing(tmp_path, monkeypatch, capsys):
    """Neither fetched nor converted nor linked: what a launcher would do is printed."""
    monkeypatch.setenv("SLIME_DRY_RUN", "1")
    monkeypatch.setattr(command_utils.shutil, "which", lambda *a, **k: None)
    assert command_utils.exec_command(f"touch {tmp_path}/made") is None
    assert command_utils.exec_command("echo 1", capture_output=True) == ""
    command_utils.hf_download_dataset("a/b", str(tmp_path))
    command_utils.convert_checkpoint("Tiny", "tiny", 8, dir_dst=str(tmp_path))
    command_utils.fp8_cast_bf16(f"{tmp_path}/fp8", f"{tmp_path}/bf16")
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.count("not in a dry run") == 5
