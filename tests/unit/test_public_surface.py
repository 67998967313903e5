"""Every name that plug-ins and projects import is there, can be called their way, and is patched where it lives."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import warnings
from types import ModuleType, SimpleNamespace

import pytest

from slime.rollout import data_source, sglang_rollout
from slime.utils.data import Dataset
from slime.utils.misc import SingletonMeta, group_by
from slime.utils.moved import moved
from slime.utils.types import Sample
from tests.support.imports import watch
from tests.support.public_surface import Name, parse_call, problems, read_table, signature_of
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts

ROWS = read_table()
PRESENT = [row for row in ROWS if row.state != "not yet"]
NOT_YET = [row for row in ROWS if row.state == "not yet"]
OLD = [row for row in ROWS if row.state == "old"]
ADAPTERS = {
    "slime.backends.megatron_utils.update_weight_utils.named_parameters",
    "slime.ray.placement_group.create_actor_group",
    "slime.ray.placement_group.create_rollout_group",
    "slime.utils.ppo_utils.compute_log_probs",
    "slime.utils.wandb_utils.init_wandb_primary",
    "slime.utils.wandb_utils.init_wandb_secondary",
}
PATCHED_BY_USERS = ("slime.rollout.sglang_rollout", "slime.agent.adapters.common")


def by_module(rows: list[Name]) -> list:
    modules = group_by(rows, key=lambda row: row.module)
    return [pytest.param(group, id=module) for module, group in modules.items()]


def of_kind(*kinds: str) -> list:
    return by_module([row for row in PRESENT if row.kind in kinds])


def test_the_table_is_well_formed():
    paths = [row.path for row in ROWS]
    assert len(set(paths)) == len(paths) > 300
    assert {row.state for row in ROWS} <= {"here", "old", "not yet"}
    kinds = {"module", "class", "function", "coroutine", "method", "property", "field", "attribute", "value"}
    assert {row.kind for row in ROWS} <= kinds
    assert [row.path for row in ROWS if row.state != "here" and not row.note] == []


@pytest.mark.parametrize("rows", of_kind("module", "class", "function", "coroutine", "method", "property", "value"))
def test_everything_imports(rows: list[Name]):
    for row in rows:
        row.load()


@pytest.mark.parametrize("rows", of_kind("function", "coroutine", "class", "method"))
def test_everything_can_be_called_as_users_do(rows: list[Name]):
    called = [row for row in rows if not inspect.isabstract(row.load())]
    wrong = {row.path: problems(signature_of(row), parse_call(row.call)) for row in called}
    assert {path: found for path, found in wrong.items() if found} == {}


@pytest.mark.parametrize("rows", of_kind("function", "coroutine", "class"))
def test_everything_is_of_its_kind(rows: list[Name]):
    for row in rows:
        loaded = row.load()
        found = (inspect.isclass(loaded), inspect.iscoroutinefunction(loaded))
        assert found == (row.kind == "class", row.kind == "coroutine"), row.path


@pytest.mark.parametrize("rows", of_kind("property"))
def test_properties_are_read_without_a_call(rows: list[Name]):
    for row in rows:
        assert isinstance(inspect.getattr_static(row.owner(), row.leaf), property), row.path


@pytest.mark.parametrize("rows", of_kind("field"))
def test_fields_and_their_defaults(rows: list[Name]):
    for row in rows:
        field = {field.name: field for field in dataclasses.fields(row.owner())}[row.leaf]
        default = field.default_factory() if field.default is dataclasses.MISSING else field.default
        assert default == eval(row.note, {"Sample": Sample}), row.path


def test_sample_has_no_field_that_the_table_does_not_know():
    table = {row.leaf for row in ROWS if row.kind == "field" and row.name.startswith("Sample.")}
    assert {field.name for field in dataclasses.fields(Sample)} == table


@pytest.fixture
def instances(tmp_path, monkeypatch):
    """One of each class whose attributes users read."""
    for module in (sglang_rollout, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: CharTokenizer())
    path = str(write_prompts(tmp_path / "prompts.jsonl", 3))
    args = rollout_args(prompt_data=path)
    SingletonMeta.clear_instances()
    yield {
        "GenerateState": sglang_rollout.GenerateState(args),
        "RolloutDataSource": data_source.RolloutDataSource(args),
        "RolloutDataSourceWithBuffer": data_source.RolloutDataSourceWithBuffer(args),
        "Dataset": Dataset(path, CharTokenizer(), None, None, prompt_key="input"),
    }
    SingletonMeta.clear_instances()


def test_attributes_of_instances(instances):
    rows = [row for row in PRESENT if row.kind == "attribute"]
    missing = [row.path for row in rows if not hasattr(instances[row.name.partition(".")[0]], row.leaf)]
    assert missing == []
    with instances["GenerateState"].dp_rank_context():  # where requests read it
        assert instances["GenerateState"].dp_rank == 0


@pytest.mark.parametrize("row", [pytest.param(row, id=row.path) for row in NOT_YET])
def test_what_is_not_yet_there_is_taken_off_the_list_when_it_comes(row: Name):
    try:
        row.load()
    except (ImportError, AttributeError):
        return
    pytest.fail(f"{row.path} can be imported now: change its state in tests/data/public_surface.tsv to `here`")


@pytest.mark.parametrize("row", [pytest.param(row, id=row.path) for row in OLD])
def test_old_names_say_where_they_are_now(row: Name):
    new_module, _, new_name = row.note.rpartition(".")
    new = getattr(importlib.import_module(new_module), new_name)
    module = importlib.import_module(row.module)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        old = getattr(module, row.name)
    if caught:  # a mere re-export
        assert old is new
        assert [w.category for w in caught] == [DeprecationWarning]
        assert row.note in str(caught[0].message)
        assert caught[0].filename == __file__  # the line of the user, not of ours
    else:  # an adapter with a signature of its own, which warns when it is called
        assert row.path in ADAPTERS


def test_moved_names_that_never_were_are_errors():
    module = ModuleType("somewhere")
    module.__getattr__ = moved("somewhere", {"sqrt": "math.sqrt"})
    with pytest.warns(DeprecationWarning, match=r"somewhere\.sqrt is the path of slime <= 0\.3\.1 .* use math\.sqrt"):
        assert module.sqrt(9) == 3
    with pytest.raises(AttributeError, match=r"module 'somewhere' has no attribute 'sqtr'"):
        module.sqtr  # noqa: B018


def test_modules_that_users_patch_are_the_homes_of_their_functions():
    rows = [row for row in PRESENT if row.module in PATCHED_BY_USERS and "." not in row.name]
    imported_there = {"load_function", "TurnRecord"}  # and looked up there
    homes = {row.path: row.load().__module__ for row in rows if row.name not in imported_there}
    assert len(homes) >= 10
    assert {path: home for path, home in homes.items() if not path.startswith(home + ".")} == {}


def test_old_modules_cost_nothing_until_a_name_is_used():
    old = sorted({row.module for row in OLD} - {row.module for row in ROWS if row.state == "here"})
    light = [name for name in old if not name.startswith(("slime.ray", "slime.backends"))]
    found = watch("\n".join(f"import {name}" for name in light), ["torch", "ray", "transformers", "wandb"])
    assert found.offenders == {}, found.explain()


@pytest.mark.parametrize(
    ("actual", "call", "expected"),
    [
        ("args, sample, evaluation=False", "args, sample, evaluation=False", []),
        ("args, sample, more=None, **kw", "args, sample, **kw", []),
        ("a, b, *, c=1", "x, y, /, *, c=1", []),
        ("args, n=3", "args, n=...", []),
        ("sample, args", "args, sample", ["parameter 0 is sample, not args", "parameter 1 is args, not sample"]),
        ("args", "args, sample", ["takes no parameter 1 (sample)"]),
        ("args, sample, more", "args, sample", ["asks for more too"]),
        ("args, *, key", "args", ["asks for key too"]),
        ("args", "args, *, key=None", ["takes no keyword key"]),
        ("args, n", "args, n=1", ["n has no default"]),
        ("args, n=2", "args, n=1", ["n defaults to 2, not 1"]),
        ("args", "args, **kw", ["takes no **kw"]),
        ("a, /, *, b", "*, a, b", ["takes no keyword a"]),
    ],
)
def test_incompatible_signatures_are_noticed(actual, call, expected):
    found = problems(parse_call(actual), parse_call(call))
    assert [p for p in found if p in expected] == expected
    assert bool(found) == bool(expected)


@pytest.fixture
def args(instances):
    return instances["GenerateState"].args


async def test_a_patched_generate_is_used(args, monkeypatch):
    async def mine(args, sample, sampling_params, evaluation=False):
        sample.response, sample.status = "mine", Sample.Status.COMPLETED
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", mine)
    sample = await sglang_rollout.generate_and_rm(args, Sample(index=1, prompt="p"), {})
    assert sample.response == "mine"


async def test_a_patched_generate_and_rm_is_used(args, monkeypatch):
    async def mine(args, sample, sampling_params, evaluation=False):
        sample.reward = 7
        return sample

    monkeypatch.setattr(sglang_rollout, "generate_and_rm", mine)
    group = await sglang_rollout.generate_and_rm_group(args, [Sample(index=1), Sample(index=2)], {})
    assert [sample.reward for sample in group] == [7, 7]


async def test_a_patched_reward_is_used(args, monkeypatch):
    async def mine(args, sample, **kwargs):
        return 11

    monkeypatch.setattr(sglang_rollout, "async_rm", mine)
    finished = Sample(index=1, status=Sample.Status.COMPLETED, response="r")
    assert (await sglang_rollout.generate_and_rm(args, finished, {})).reward == 11


async def test_a_patched_load_function_is_used(args, monkeypatch):
    async def mine(args, sample, sampling_params):
        sample.response, sample.status, sample.reward = "loaded", Sample.Status.COMPLETED, 0
        return sample

    monkeypatch.setattr(sglang_rollout, "load_function", lambda path, *a: mine)
    sample = Sample(index=1, generate_function_path="no.such.function")
    assert (await sglang_rollout.generate_and_rm(args, sample, {})).response == "loaded"


async def test_a_patched_state_is_used(args, monkeypatch):
    state = sglang_rollout.GenerateState(args)
    state.aborted = True
    monkeypatch.setattr(sglang_rollout, "GenerateState", lambda args: state)
    sample = await sglang_rollout.generate_and_rm(SimpleNamespace(**vars(args)), Sample(index=1), {})
    assert sample.status is Sample.Status.ABORTED
