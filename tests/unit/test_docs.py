"""The checker of the documentation finds what is wrong with a page, and nothing wrong with a good one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.arguments.availability import is_available
from slime.arguments.groups import slime_flags
from slime.ray.manager.rollout_metrics import asked_for_metrics, eval_metrics, rollout_metrics
from slime.utils.types import Sample
from tools import check_docs, gen_examples_doc, gen_quick_start_doc
from tools.doc_commands import commands, flag_mistake
from tools.markdown import Fence, read_page, slug
from tools.metric_names import undocumented


def page(folder: Path, text: str, name: str = "page.md") -> Path:
    path = folder / name
    path.write_text(text)
    return path


GOOD = """# A page
See [the other](other.md#two-words), [above](#a-page), [outside](https://example.org/x) and `[not](a-link.md)`.

```bash
python train.py --hf-checkpoint m --rollout-batch-size 8 --sglang-mem-fraction-static 0.5 \\
    --tensor-model-parallel-size 2  # a comment --with-words
FLAG=1 python train_async.py --update-weights-interval 2 ... && make test
$ python -m tools.tiny_model --family qwen3 --out m
ls --no-such-flag-of-ls
```
Words in code are not prose: `goes on`, and neither are [those of a link](https://example.org/behaviour).
Spans: `--sglang-*`, `--no-offload-train`, `slime/driver.py`, `slime.utils.types.Sample`, `--rm-type math`.

```python
x = 1
```
"""


def test_a_good_page_has_no_mistake(tmp_path):
    other = page(tmp_path, "## Two words\n", "other.md")
    assert check_docs.check_pages([page(tmp_path, GOOD), other]) == []


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("\n[x](gone.md)", 2, "gone.md"),
        ("[x](#nowhere)", 1, "#nowhere"),
        ("# Here\n[x](page.md#there)", 2, "#there"),
        ('<img src="gone.svg">', 1, "gone.svg"),
        ("[x]: gone.md", 1, "gone.md"),
        ("a\n![two\nlines](gone.svg)", 3, "gone.svg"),
        ("`a span\nof two lines`\n[x](gone.md)", 3, "gone.md"),
        ("and `--lr 1\n--colocated`", 1, "unknown flag --colocated"),
        ("```bash\npython train.py --rollout-batch-sizes 8\n```", 2, "did you mean --rollout-batch-size"),
        (
            "```bash\necho\npython train.py --lr 1e-6 \\\n  --sglang-mem-fraction-statics ...\n```",
            3,
            "--sglang-mem-frac",
        ),
        ("```bash\npython train.py --rollout-batch-size many\n```", 2, "expected an integer"),
        ("```bash\npython train.py --moe-token-drop-policy position\n```", 2, "not available yet"),
        ("```bash\nray job submit -- python3 train.py --colocated\n```", 2, "did you mean --colocate"),
        ("```bash\npython -m tools.no_such_tool\n```", 2, "no module tools.no_such_tool"),
        ("```bash\npython -m slime.arguments --colocated\n```", 2, "did you mean --colocate"),
        ("```bash\npython -m tools.tiny_model --size 3\n```", 2, "no flag --size"),
        ("```bash\nmake everything\n```", 2, "no target everything"),
        ("```bash\npython train.py --lr '1e-6\n```", 2, "a shell would not understand"),
        ("Use `--colocated`.", 1, "unknown flag --colocated"),
        ("Use `--sgl-*`.", 1, "no flag starts with --sgl-"),
        ("See `slime/drivers.py`.", 1, "there is no slime/drivers.py"),
        ("See `slime.utils.types.Example`.", 1, "has no Example"),
        ("See `slime.nothing`.", 1, "no nothing"),
        ("```python\n\nx =\n```", 3, "does not compile"),
        ("A rollout\nGoes on.", 2, "'Goes on': write continue"),
        ("The [Optimiser](https://example.org/behaviour)", 1, "'Optimiser': write American spelling"),
        ("```bash\nls", 1, "never closed"),
    ],
)
def test_a_mistake_is_named_with_file_and_line(tmp_path, text, line, words):
    path = page(tmp_path, text)
    mistakes = check_docs.check_pages([path])
    assert len(mistakes) == 1, mistakes
    assert mistakes[0].startswith(f"{path}:{line}: ")
    assert words in mistakes[0]


def test_help_is_no_mistake_and_wildcards_are_prefixes():
    assert flag_mistake("--help") == ""
    assert flag_mistake("--router-*") == ""
    assert flag_mistake("--lr=1e-6") == ""
    assert flag_mistake("--learning-rates")


def test_a_page_that_nothing_leads_to_is_found(tmp_path):
    index = page(tmp_path, "[a](a.md)", "README.md")
    a = page(tmp_path, "[b](b.md#b)", "a.md")
    b = page(tmp_path, "# B", "b.md")
    assert check_docs.check_pages([index, a, b], index) == []
    lost = page(tmp_path, "[index](README.md)", "lost.md")
    assert check_docs.check_pages([index, a, b, lost], index) == [f"{lost}:1: no link leads here from {index}"]
    assert check_docs.check_pages([a, b], index) == [f"{index}:1: the index of the documentation is missing"]


def test_a_generated_page_that_was_edited_is_found(tmp_path, monkeypatch):
    generator = check_docs.gen_arguments_doc
    edited = page(tmp_path, generator.render() + "\nBy hand.\n", "arguments.md")
    monkeypatch.setattr(check_docs, "GENERATED", {edited: generator})
    assert check_docs.check_generated() == [
        f"{edited}:1: does not match what it is generated from; run `python -m tools.gen_arguments_doc`"
    ]
    edited.write_text(generator.render())
    assert check_docs.check_generated() == []


def test_commands_are_split_like_a_shell_does():
    text = "A=1 python train.py --x 'a b' \\\n  --y 2  # why\n\n$ make test && ls; echo"
    assert list(commands(Fence("bash", text, 10))) == [
        (10, ["A=1", "python", "train.py", "--x", "a b", "--y", "2"]),
        (13, ["make", "test"]),
        (13, ["ls"]),
        (13, ["echo"]),
    ]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [("Two words", "two-words"), ("`--x` and *y*: why?", "--x-and-y-why"), ("A [link](x.md), then", "a-link-then")],
)
def test_anchors_are_those_of_github(heading, anchor):
    assert slug(heading) == anchor


def test_repeated_headings_are_numbered(tmp_path):
    assert read_page(page(tmp_path, "# A\n## B\n## B\n")).anchors == {"a", "b", "b-1"}


def test_the_documentation_has_no_mistake():
    assert [*check_docs.check_pages(check_docs.documents(), check_docs.INDEX), *check_docs.check_generated()] == []


def test_every_hook_is_on_the_customization_page():
    page = (check_docs.ROOT / "docs/en/get_started/customization.md").read_text()
    hooks = [
        flag.option
        for flag in slime_flags()
        if flag.option.endswith("-path") and not flag.traits.path and is_available(flag)
    ]
    assert len(hooks) > 20
    assert [hook for hook in hooks if f"`{hook}`" not in page] == []


def test_every_variable_that_slime_reads_is_documented():
    page = (check_docs.ROOT / "docs/en/reference/environment_variables.md").read_text()
    read = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)\s*\"([A-Z][A-Z0-9_]+)\"|\"(SLIME_[A-Z0-9_]+)\"")
    sources = [p for p in (check_docs.ROOT / "slime").rglob("*.py") if "cpu_standins" not in p.parts]
    found = {name for p in sources for match in read.findall(p.read_text()) for name in match if name}
    assert {"SLIME_HOST_IP", "SLIME_RUN_ID", "TENSORBOARD_DIR"} <= found
    internal = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "SLURM_JOB_ID"}
    assert sorted(name for name in found - internal if f"`{name}`" not in page) == []


def test_every_metric_of_a_rollout_is_documented():
    args = SimpleNamespace(
        advantage_estimator="grpo", reward_key=None, log_reward_category="kind", log_passrate=True, log_multi_turn=True,
        rollout_num_gpus=2, rollout_max_response_len=4,
    )  # fmt: skip
    samples = [
        Sample(
            index=i, group_index=i // 2, response="ab", response_length=2, reward=1.0, weight_versions=["3"],
            non_generation_time=0.5, metadata={"round_number": 1}, status=Sample.Status.COMPLETED,
        )
        for i in range(4)
    ]  # fmt: skip
    for sample in samples:
        sample.spec_info.spec_draft_token_num = sample.spec_info.spec_verify_ct = 2
        sample.prefix_cache_info.total_prompt_tokens = 4
        counts = dict.fromkeys(("reward", "success", "turns", "tool_errors", "seconds", "rewritten_by_template"), 0)
        sample.environment_episode = {"environment": "maze", "difficulty": 1, "tool_calls": 2, **counts}
    names = set(rollout_metrics(args, samples, 1.0)) | set(asked_for_metrics(args, samples))
    names |= set(eval_metrics(args, {"sums": {"rewards": [1.0] * 4, "truncated": [0] * 4, "samples": samples}}))
    assert {"rollout/zero_std/count_1.0", "passrate/pass@2", "eval/sums-pass@1"} <= names
    assert "eval/sums/environment/maze/tool_error_rate" in names
    assert undocumented(names) == []
    assert undocumented(["rollout/nonsense", "train/loss", "nonsense"]) == ["nonsense", "rollout/nonsense"]


def test_a_run_is_compared_with_the_page(tmp_path, monkeypatch, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"name": "train/loss"}\n{"name": "train/unheard_of"}\n')
    monkeypatch.setattr("sys.argv", ["check_docs", "--run", str(tmp_path)])
    assert check_docs.main() == 1
    assert capsys.readouterr().out == "docs/en/reference/metrics.md does not describe train/unheard_of\n"


def test_the_quick_start_shows_what_the_quickstart_runs(monkeypatch):
    shown = gen_quick_start_doc.render()
    monkeypatch.setattr(gen_quick_start_doc.recipe, "SFT_BATCH", 9999)
    assert "--rollout-batch-size 9999" in gen_quick_start_doc.render()
    assert "--rollout-batch-size 9999" not in shown
    assert set(re.findall(r"<!-- recipe: (\w+) -->", shown)) == set(gen_quick_start_doc.commands())


def test_the_results_of_examples_are_merged_and_shown():
    def result(seed: int, shuffled: bool, after: float, rollouts: int = 20) -> gen_examples_doc.Result:
        return {"example": "e", "seed": seed, "shuffled": shuffled, "rollouts": rollouts, "before": {"d": 0.25},
                "after": {"d": after}, "targets": {"d": 0.7} if seed else {}, "evaluations": {},
                "seconds": {"sft": 120.0, "grpo": 60.0 + 30 * seed} if not shuffled else {"grpo": 9.0},
                "cores": 2 - seed}  # fmt: skip

    kept = gen_examples_doc.merged([], [result(1, False, 0.9), result(0, True, 0.26, 10), result(0, False, 0.7)])
    assert [(one["seed"], one["shuffled"]) for one in kept] == [(0, False), (0, True), (1, False)]
    assert "evaluations" not in kept[0]
    again = gen_examples_doc.merged(kept, [result(0, False, 0.8)])
    assert gen_examples_doc.table(again).splitlines()[2:] == [
        "| [e](../../examples/e/README.md) | `d` | 0 | 20 | 25.0% | 80.0% |  | 26.0% after 10 | 3.0 on 2 |",
        "| [e](../../examples/e/README.md) | `d` | 1 | 20 | 25.0% | 90.0% | 70% |  | 3.5 on 1 |",
    ]
