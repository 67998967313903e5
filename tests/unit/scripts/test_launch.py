"""``scripts/lib/launch.sh``: where a run goes, from stand-ins for Python and Ray that record how they are called."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.script_repository import Repository

ONE_NODE, TWO_NODES = ["--actor-num-nodes", "1"], ["--actor-num-nodes", "2"]
CLUSTER = {"RAY_ADDRESS": "10.0.0.1:6379"}
DASHBOARD = {"RAY_ADDRESS": "http://10.0.0.1:8265"}


def launch(repository: Repository, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """``launch train.py WORDS`` in a script of its own, started from another directory."""
    script = repository.scripts / "run-test.sh"
    script.write_text('set -euo pipefail\nsource "$(dirname "$0")/lib/launch.sh"\nlaunch train.py "$@"\n')
    return subprocess.run(
        ["/bin/bash", str(script), *words],
        env=repository.environment(**variables),
        cwd=repository.bin,
        capture_output=True,
        text=True,
        timeout=30,
    )


def direct(repository: Repository, *words: str) -> list[list[str]]:
    return [["python3", str(repository.path / "train.py"), *words]]


def test_one_node_runs_here(repository):
    assert launch(repository, *ONE_NODE).returncode == 0
    assert repository.called() == direct(repository, *ONE_NODE)


@pytest.mark.parametrize("value", ["1", "yes"])
def test_a_dry_run_needs_no_cluster_and_asks_none(repository, value):
    assert launch(repository, *TWO_NODES, SLIME_DRY_RUN=value, **DASHBOARD).returncode == 0
    assert repository.called() == direct(repository, *TWO_NODES, "--dry-run")


def test_a_dry_run_can_be_switched_off(repository):
    launch(repository, *ONE_NODE, SLIME_DRY_RUN="0")
    assert repository.called() == direct(repository, *ONE_NODE)


@pytest.mark.parametrize("address", [CLUSTER, {"RAY_ADDRESS": "auto"}, {"RAY_ADDRESS": "ray://head:10001"}])
def test_a_named_cluster_is_joined_by_the_program_itself(repository, address):
    assert launch(repository, *TWO_NODES, **address).returncode == 0
    assert repository.called() == direct(repository, *TWO_NODES)


@pytest.mark.parametrize("words", [["--ray-address", "head:6379"], ["--ray-address=head:6379"]])
def test_a_cluster_can_be_named_by_a_flag(repository, words):
    assert launch(repository, *TWO_NODES, *words).returncode == 0
    assert repository.called() == direct(repository, *TWO_NODES, *words)


@pytest.mark.parametrize(
    "address",
    [
        DASHBOARD,
        {"RAY_ADDRESS": "https://ray.example.org"},
        {"RAY_API_SERVER_ADDRESS": "http://10.0.0.1:8265"},
        {"RAY_API_SERVER_ADDRESS": "http://10.0.0.1:8265", **CLUSTER},
        {"RAY_API_SERVER_ADDRESS": "http://10.0.0.2:8265", **DASHBOARD},
    ],
)
@pytest.mark.parametrize("nodes", [ONE_NODE, TWO_NODES])
def test_a_dashboard_gets_a_job(repository, address, nodes):
    """Words arrive one by one, JSON with spaces and quotes too; the job goes back to the directory of the user."""
    json = '{"A": "1 $HOME"}'
    repository.stand_in(repository.bin / "ray", "exit 7")
    assert launch(repository, *nodes, "--train-env-vars", json, **address).returncode == 7
    dashboard = address.get("RAY_API_SERVER_ADDRESS") or address["RAY_ADDRESS"]
    (command,) = direct(repository, *nodes, "--train-env-vars", json)
    assert repository.called() == [
        ["ray", "job", "submit", "--address", dashboard, "--", "env", "-C", str(repository.bin), *command]
    ]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (TWO_NODES, 2),
        (["--actor-num-nodes=16", "--colocate"], 16),
        (["--actor-num-nodes", "8", "--rollout-num-gpus", "64"], 16),
        (["--actor-num-gpus-per-node", "8", "--rollout-num-gpus", "1"], 2),
        (["--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4", "--rollout-num-gpus", "5"], 3),
        (["--actor-num-nodes", "1", "--actor-num-nodes", "3"], 3),
    ],
)
@pytest.mark.parametrize("address", [{}, {"RAY_ADDRESS": ""}, {"RAY_ADDRESS": "local"}])
def test_several_nodes_need_a_cluster(repository, words, nodes, address):
    done = launch(repository, *words, **address)
    assert done.returncode == 2
    assert f"run-test.sh: this run needs {nodes} nodes" in done.stderr
    assert "ray start --head" in done.stderr
    assert "SLIME_DRY_RUN=1" in done.stderr
    assert repository.called() == []


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--actor-num-gpus-per-node", "4", "--rollout-num-gpus", "4"],
        ["--rollout-num-gpus", "8", "--colocate"],
        ["--rollout-num-gpus", "8", "--debug-train-only"],
        ["--actor-num-nodes", "16", "--actor-num-nodes", "1"],
        ["--actor-num-nodes", "many"],  # the program explains that better
        ["--actor-num-nodes"],
    ],
)
def test_what_fits_on_one_node_needs_none(repository, words):
    assert launch(repository, *words).returncode == 0
    assert repository.called() == direct(repository, *words)


def test_the_repositorys_own_environment_comes_first(repository):
    own = repository.path / ".venv" / "bin"
    for name in ("python", "ray"):
        repository.stand_in(own / name, "exit 0")
    launch(repository)
    launch(repository, **DASHBOARD)
    here, job = repository.called()
    program = str(repository.path / "train.py")
    assert here == ["python", program]
    assert job[:3] == ["ray", "job", "submit"]
    assert job[-2:] == [str(own / "python"), program]


def test_the_exit_status_is_the_programs(repository):
    repository.stand_in(repository.bin / "python3", "exit 143")
    assert launch(repository).returncode == 143


def test_a_script_hands_its_words_on(repository):
    """``run-X.sh WORDS``: behind the script's own, so that they win."""
    script = repository.scripts / "run-qwen3-4B.sh"
    done = subprocess.run(
        [str(script), "--num-rollout", "1"], env=repository.environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    (call,) = repository.called()
    assert call[:2] == ["python3", str(repository.path / "train.py")]
    assert call[-2:] == ["--num-rollout", "1"]
    assert call.index("--hf-checkpoint") < len(call) - 2


def test_a_script_says_what_it_needs(repository):
    script = repository.scripts / "low_precision" / "run-kimi-k2-Thinking-int4.sh"
    done = subprocess.run([str(script)], env=repository.environment(), capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "this run needs 32 nodes" in done.stderr
    assert repository.called() == []
