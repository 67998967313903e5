"""Every launch script, as a user would try it first: ``SLIME_DRY_RUN=1``, on a machine that has nothing."""

from __future__ import annotations

import re
import tempfile
from typing import Any

import pytest

from tests.support.script_repository import Repository, files_below, make_dry_repository
from tools import gen_scripts_table
from tools.script_runs import CONFIG_FOLDER, SCRIPTS, DryRun, dry_run, dry_runs, script_names

NAMES = script_names()
SIZES = ("tensor_model", "pipeline_model", "context", "expert_model")

# What is published of each recipe: nodes, then tensor, pipeline, context and expert parallel size, then GPUs of an
# engine (0: none). Sizes that are not published are left to the script (None).
PUBLISHED: dict[str, tuple[int, int | None, int, int, int, int | None]] = {
    "deepseek-r1": (16, 8, 4, 4, 32, 64),
    "deepseek-v3.2": (16, 8, 4, 4, 32, 64),  # none is published: that of deepseek-r1, which has the same sizes
    "glm4-9B": (1, None, 1, 2, 1, 2),
    "glm4.7-30B-A3B": (1, 2, 2, 2, 4, None),  # with two stages on 8 GPUs, 4 are left for experts
    "glm4.7-355B-A32B": (8, 8, 4, 2, 16, 32),
    "glm5-744B-A40B": (32, 4, 4, 2, 32, 64),
    "glm5.2-744B-A40B": (32, 4, 8, 8, 32, 64),
    "kimi-k2-Instruct": (32, 8, 8, 4, 32, 16),
    "kimi-k2-Thinking": (32, 8, 8, 4, 32, 16),
    "mimo-7B-rl-eagle": (1, 2, 1, 1, 1, None),
    "minimax-m2": (16, 2, 2, 1, 32, 16),  # more expert parallelism than published: 4 leaves no room on a GPU
    "moonlight-16B-A3B": (1, 4, 1, 1, 8, None),
    "qwen2.5-0.5B-gb10-smoke": (1, 1, 1, 1, 1, 1),
    "qwen2.5-0.5B-reproducibility": (1, 1, 1, 1, 1, None),
    "qwen3-235B-A22B": (16, 4, 4, 2, 16, 32),
    "qwen3-235B-A22B-sft": (4, 4, 1, 1, 32, 0),
    "qwen3-30B-A3B": (1, 4, 1, 1, 8, 8),
    "qwen3-32B": (1, 8, 1, 1, 1, 8),
    "qwen3-4B": (1, 2, 1, 1, 1, 2),
    "qwen3-4B-amd": (1, 2, 1, 1, 1, 2),
    "qwen3-4B-base-sft": (1, 1, 1, 1, 1, 0),
    "qwen3-next-80B-A3B": (4, 2, 4, 2, 8, 8),
    "qwen3.5-27B": (1, 4, 2, 1, 1, None),
    "qwen3.5-35B-A3B-sft": (1, 2, 1, 1, 8, 0),
    "low_precision/kimi-k2-Thinking-int4": (32, 8, 8, 4, 32, 16),
    "low_precision/moonlight-16B-A3B-int4": (1, 4, 1, 1, 8, None),
    "low_precision/qwen3-235B-A22B-int4": (8, 4, 4, 2, 16, 8),
    "low_precision/qwen3-30B-A3B-int4": (1, 4, 1, 1, 8, 8),
    "low_precision/qwen3-30b-a3b-fp8": (1, 4, 1, 1, 8, 8),
    "low_precision/qwen3-4b-fp8": (1, 2, 1, 1, 1, 2),
}


@pytest.fixture(scope="module")
def dry_repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    return make_dry_repository(tmp_path_factory.mktemp("dry"))


@pytest.fixture(scope="module")
def runs(dry_repository: Repository) -> dict[str, DryRun]:
    """One dry run of every script, from a directory that is not the repository's."""
    folder = dry_repository.path.parent
    env = dry_repository.environment(TMPDIR=str(folder / "tmp"))
    before = files_below(dry_repository.path)
    done = dry_runs(NAMES, scripts=dry_repository.scripts, env=env, cwd=folder / "elsewhere")
    assert files_below(dry_repository.path) == before
    return done


def recipe(name: str) -> str:
    return name.replace("run-", "").removesuffix(".sh")


def test_every_published_recipe_has_a_script():
    assert {recipe(name) for name in NAMES} == PUBLISHED.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_accepts_the_flags_and_prints_the_plan(runs, name):
    run = runs[name]
    assert (run.status, run.err) == (0, "")
    assert "--ignore-unknown-flags" not in (SCRIPTS / name).read_text()
    for title in ("Loop", "Batches", "Placement", "Memory", "Not checked"):
        assert f"\n{title}\n" in run.out
    warnings = run.out.partition("\nWarnings\n")[2].partition("\n\n")[0].split("  - ")[1:]
    # scripts give a flag again that the list of their model has
    assert [warning for warning in warnings if "is given 2 times; the last one holds" not in warning] == []


def test_dry_runs_start_nothing_and_write_nothing(runs, dry_repository):
    folder = dry_repository.path.parent
    assert dry_repository.called() == []
    assert [files_below(folder / name) for name in ("home", "tmp", "elsewhere")] == [set(), set(), set()]
    notes = dry_repository.notes.read_text().splitlines()
    configurations = f"write {tempfile.gettempdir()}/{CONFIG_FOLDER}"
    assert [note for note in notes if not note.startswith(configurations)] == []
    assert len(notes) >= len(NAMES)  # the watcher does see what is written


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_is_the_published_one(runs, name):
    values = runs[name].values
    nodes, tp, pp, cp, ep, engine = PUBLISHED[recipe(name)]
    per_node = values["num_gpus_per_node"]
    assert per_node == (1 if "gb10" in name else 8)
    gpus = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
    if not values["colocate"] and not values["debug_train_only"]:
        gpus += values["rollout_num_gpus"]
    assert gpus == nodes * per_node
    found = {size: values.get(f"{size}_parallel_size", 1) for size in SIZES}
    wanted = dict(zip(SIZES, (tp, pp, cp, ep), strict=True))
    assert found == {size: found[size] if value is None else value for size, value in wanted.items()}
    if engine == 0:
        assert values["debug_train_only"]
        assert values["loss_type"] == "sft_loss"
    elif engine is not None:
        assert values["rollout_num_gpus_per_engine"] == engine


@pytest.mark.parametrize("name", NAMES)
def test_batches_layers_and_experts_divide(runs, name):
    values = runs[name].values
    tp, pp, cp, ep = (values.get(f"{size}_parallel_size", 1) for size in SIZES)
    trainer = values["actor_num_nodes"] * values["actor_num_gpus_per_node"]
    samples = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    assert samples % values["global_batch_size"] == 0
    assert trainer % (tp * pp * cp) == 0
    assert trainer % (pp * ep) == 0
    assert values["num_attention_heads"] % tp == 0
    assert (values.get("num_experts") or ep) % ep == 0
    assert stages(values, pp)[0] > 0
    assert len(set(stages(values, pp)[1:-1])) <= 1
    if not values["debug_train_only"]:
        assert values["rollout_num_gpus"] % values["rollout_num_gpus_per_engine"] == 0


def stages(values: dict[str, Any], pp: int) -> list[int]:
    """Layers of every pipeline stage."""
    last = values.get("decoder_last_pipeline_num_layers") or values["num_layers"] // pp
    first = values.get("decoder_first_pipeline_num_layers")
    if pp == 1:
        return [last]
    left, others = values["num_layers"] - last - (first or 0), pp - 1 - (first is not None)
    assert left % others == 0
    return [first or left // others, *[left // others] * (pp - 2), last]


def test_everything_lies_below_one_directory(dry_repository):
    """``BASE_DIR`` moves checkpoints, data and results; no path is left behind."""
    env = dry_repository.environment(BASE_DIR="/data/everything")
    run = dry_run("run-deepseek-r1.sh", scripts=dry_repository.scripts, env=env)
    paths = {w for w in re.findall(r"\S+", run.config) if w.startswith("/")} - {"/data/everything"}
    assert {path for path in paths if not path.startswith("/data/everything/")} == set()
    assert len(paths) >= 5


def test_words_and_variables_win_over_the_script(dry_repository):
    env = dry_repository.environment(TP="4", ENGINE_GPUS="1", GPUS_PER_NODE="4")
    words = ["--num-rollout", "7", "--lr", "2e-6", "--advantage-estimator", "gspo"]
    run = dry_run("run-qwen3-4B.sh", scripts=dry_repository.scripts, words=words, env=env)
    assert run.status == 0, run.err
    wanted = {
        "num_rollout": 7, "lr": 2e-6, "advantage_estimator": "gspo", "tensor_model_parallel_size": 4,
        "rollout_num_engines": 4, "world_size": 4,
    }  # fmt: skip
    assert {name: run.values[name] for name in wanted} == wanted


def test_a_mistyped_word_is_refused(dry_repository):
    run = dry_run(
        "run-qwen3-4B.sh", scripts=dry_repository.scripts, words=["--colocated"], env=dry_repository.environment()
    )
    assert run.status == 2
    assert "--colocate" in run.err


def test_the_table_of_the_readme_is_that_of_the_dry_runs(runs):
    """It says which features this version refuses, in the words of the dry runs."""
    assert gen_scripts_table.PAGE.read_text() == gen_scripts_table.render(runs.values()), (
        "run `python -m tools.gen_scripts_table`"
    )


NOT_YET = "not available yet in this version; leave it out"


@pytest.mark.parametrize(
    ("sentences", "features"),
    [
        ([], []),
        ([f"--use-routing-replay is {NOT_YET}"], ["routing replay"]),
        ([f"--spec acme.models get_spec is {NOT_YET}"], ["`--spec`"]),
        ([f"{NOT_YET}: --moe-enable-deepep, --use-routing-replay"], ["DeepEP", "routing replay"]),
        (
            ["--sglang-config f: encoder engines (model a) are not available yet in this version: y; use x"],
            ["encoder engines"],
        ),
        (
            [f"{NOT_YET}: --new-flag, --moe-enable-deepep", f"--moe-token-dispatcher-type flex is {NOT_YET}"],
            ["`--new-flag`", "DeepEP"],
        ),
        (["--loss-mask-type new is not available yet in this version; use qwen"], ["`--loss-mask-type`"]),
        (["engines and trainer would never meet"], ["engines and trainer would never meet"]),
    ],
)
def test_refusals_are_said_as_features_or_as_they_are(sentences, features):
    assert gen_scripts_table.not_yet(sentences) == features


def test_refusals_are_read_from_the_plan():
    def refusals(verdict: str) -> list[str]:
        return DryRun(
            "x", 0, f"\nGiven\n  --a\n\nA run without GPUs would be refused: no\n{verdict}\n", "", ""
        ).refusals

    reasons = "  - --a is not available yet in this\n    version - at all\n  - --b 1: no"
    assert refusals(f"A real run would be refused:\n{reasons}") == [
        "--a is not available yet in this version - at all",
        "--b 1: no",
    ]
    assert refusals("A real run would start.") == []
    assert refusals("A real run would start with 1 warning, if everything is there.") == []
    for unreadable in ("A real run would be refused:", "It would be refused:\n  - --a", ""):
        with pytest.raises(ValueError, match="the plan of x does not say"):
            refusals(unreadable)


@pytest.mark.parametrize("word", ["kill", "pkill", "killall", "ray stop", "ray start", "sleep", "nohup", "export http"])
def test_no_script_ends_or_starts_other_programs(word):
    """Cleaning up by name would end other people's runs; only the message about a missing cluster names commands."""
    found = []
    for path in sorted(SCRIPTS.rglob("*.sh")):
        code = re.sub(r"<<END.*?^END$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        code = re.sub(r"(^|\s)#.*", "", code)
        found += [path.name] if re.search(rf"\b{word}\b", code) else []
    assert found == []


def test_scripts_can_be_executed():
    assert [name for name in NAMES if not (SCRIPTS / name).stat().st_mode & 0o111] == []
