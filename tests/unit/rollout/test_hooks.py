"""Users' functions: found at the start, called in either form, named in every error."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import await_dynamic_filter, call_dynamic_filter
from slime.rollout.hooks.contracts import contracts_of
from slime.rollout.hooks.hook import Hook, check_hooks, in_thread, make_hook, place_of
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, apply_sample_hooks, set_current_rollout_id
from slime.rollout.sglang_rollout import call_generate
from slime.utils.async_utils import get_async_loop, run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.error_text import line_of, notes_of
from tests.support.rollout_args import rollout_args

HERE = __name__
FILE = __file__


# How hooks are found


def plain(args: Any, value: Any) -> Any:
    return value


async def coroutine(args: Any, value: Any) -> Any:
    await asyncio.sleep(0)
    return value


class Callables:
    async def __call__(self, args: Any, value: Any) -> Any:
        return value


callable_object = Callables()
partial_coroutine = functools.partial(coroutine)
NUMBER = 3


@pytest.mark.parametrize("name", ["plain", "coroutine", "callable_object", "partial_coroutine"])
def test_both_forms_are_called_from_threads_and_from_the_loop(name):
    hook = make_hook(f"{HERE}.{name}", "dynamic_sampling_filter_path")
    assert hook.is_async == (name != "plain")
    assert hook(None, 5) == 5

    async def on_the_loop() -> list[Any]:
        return [await hook.awaited(None, 6), await hook.awaited_off_loop(None, 7), hook(None, 8)]

    assert run(on_the_loop()) == [6, 7, 8]


def test_a_hook_says_where_it_is():
    hook = make_hook(f"{HERE}.plain", "custom_rm_path")
    assert str(hook) == f"--custom-rm-path '{HERE}.plain' ({FILE}:{line_of(plain)})"
    assert place_of(functools.partial(plain)) == f"{FILE}:{line_of(plain)}"
    assert place_of(callable_object).startswith(f"{FILE}:")
    assert place_of(Callables).startswith(f"{FILE}:")
    assert place_of(len) == "module builtins, no source"


def test_the_flags_of_contracts_are_those_of_the_arguments():
    for name, contract in contracts_of("manager").items():
        assert contract.flag == "--" + name.replace("_", "-")


@pytest.mark.parametrize(
    ("name", "path", "error", "message"),
    [
        ("custom_rm_path", "plainn", AttributeError, r"--custom-rm-path '.*plainn'.*did you mean .*plain"),
        ("custom_rm_path", "NUMBER", TypeError, r"--custom-rm-path '.*NUMBER' is a int, expected a function: fn\(args"),
        ("buffer_filter_path", "plain", TypeError,
         r"--buffer-filter-path '.*plain' \(.*test_hooks.py:\d+\) cannot be called .* too many positional.*"
         r"Expected fn\(args, rollout_id, buffer, num_samples\), got plain\(args: "),
        ("rollout_function_path", "without_evaluation", TypeError, r"--rollout-function-path .* 'evaluation'"),
        ("data_source_path", "NoSource", TypeError, r"--data-source-path .* has no method 'get_samples'"),
        ("data_source_path", "AsyncSource", TypeError, r"'get_samples' is a coroutine function"),
        ("rollout_sample_hook_path", "no_such", AttributeError, "--rollout-sample-hook-path"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused_at_the_start(name, path, error, message):
    path = f"{HERE}.{path}"
    args = rollout_args(**{name: [path] if name == "rollout_sample_hook_path" else path})
    with pytest.raises(error, match=message):
        check_hooks(args)


def test_hooks_of_evaluation_sets_are_looked_up_too():
    dataset = SimpleNamespace(name="sums", custom_generate_function_path=None, custom_rm_path=f"{HERE}.plainn")
    with pytest.raises(AttributeError, match=r"--eval-config, data set 'sums', custom_rm_path .*did you mean"):
        check_hooks(rollout_args(eval_datasets=[dataset]))


def test_classes_of_environments_are_called_with_arguments_and_task():
    assert check_hooks(rollout_args(environment_path=["tests.support.environments.Guess"])) is None
    with pytest.raises(TypeError, match=r"environment .*EnvironmentWithoutTask.* Expected a class C\(args, task\)"):
        check_hooks(rollout_args(environment_path=[f"{HERE}.EnvironmentWithoutTask"]))


class EnvironmentWithoutTask:
    def __init__(self, args: Any) -> None:
        raise AssertionError("it is not called")

    reset = step = format_observation = close = print


def test_built_in_hooks_pass(monkeypatch):
    from slime.arguments.groups import rollout as groups

    defaults = {"rollout_function_path": groups.Rollout.model_fields["rollout_function_path"].default}
    check_hooks(
        rollout_args(
            **defaults,
            eval_function_path=defaults["rollout_function_path"],
            data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
            buffer_filter_path="slime.rollout.data_source.pop_first",
            dynamic_sampling_filter_path="slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
            custom_rm_path="examples.quickstart.reward.exact_answer",
            custom_reward_post_process_path="examples.quickstart.reward.shuffled_rewards",
            custom_generate_function_path="slime.rollout.sglang_rollout.generate",
        )
    )


def without_evaluation(args: Any, rollout_id: int, source: Any) -> Any:
    return []


class NoSource:
    def __init__(self, args: Any) -> None:
        pass


class AsyncSource(NoSource):
    async def get_samples(self, n: int) -> list[Any]:
        return []


def test_modules_are_explained():
    for path, message in [
        (
            "slime.rollout.sglang_roolout.generate",
            r"no module 'slime.rollout.sglang_roolout'; did you mean slime.*rollout",
        ),
        ("no_such_package.fn", r"no_such_package.*PYTHONPATH"),
        ("slime.utils.types.Sample.from_dict", "Sample is a class, whose methods have no path"),
        (f"{HERE}.plain.fn", "is a module, not a package"),
        ("tests.support.broken_module_for_hooks.fn", "no module"),
    ]:
        with pytest.raises(ImportError, match=message):
            load_function(path, "--custom-rm-path")


def test_modules_that_break_while_they_are_imported_name_flag_and_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hook_that_raises.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "hook_that_lacks.py").write_text("import surely_not_installed")
    (tmp_path / "hook_that_is_torn.py").write_text("def (:")
    for name, message in [
        ("raises", "importing module 'hook_that_raises' raised RuntimeError: no licence"),
        ("lacks", "module 'hook_that_lacks' cannot be imported: No module named 'surely_not_installed'"),
        ("is_torn", "importing module 'hook_that_is_torn' raised SyntaxError"),
    ]:
        with pytest.raises(ImportError, match=f"--custom-rm-path 'hook_that_{name}.fn': .*{message}"):
            load_function(f"hook_that_{name}.fn", "--custom-rm-path")


# Errors


def raising(args: Any, value: Any) -> Any:
    raise LookupError("no such column")


def test_what_a_hook_raises_names_it_and_the_samples():
    hook = make_hook(f"{HERE}.raising", "rollout_sample_filter_path")
    place = f"in --rollout-sample-filter-path '{HERE}.raising' ({FILE}:{line_of(raising)})"
    for value, about in [
        (Sample(index=3, group_index=1), ", for sample index=3 group_index=1"),
        ([[Sample(index=3, group_index=1)], [[Sample(index=4, group_index=2)]]],
         ", for 2 samples: index 3 of group 1, 4 of group 2"),
        ([Sample(index=n, group_index=0) for n in range(9)],
         ", for 9 samples: index " + ", ".join(f"{n} of group 0" for n in range(8)) + ", ..."),
        (7, ""),
    ]:  # fmt: skip
        for call in (
            lambda value=value: hook(None, value),
            lambda value=value: run(hook.awaited(None, value)),
            lambda value=value: run(hook.awaited_off_loop(None, value)),
        ):
            with pytest.raises(LookupError, match="no such column") as caught:
                call()
            assert notes_of(caught) == place + about


def exits(args: Any, value: Any) -> Any:
    raise SystemExit(3)


async def exits_too(args: Any, value: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("name", ["exits", "exits_too"])
def test_a_hook_that_calls_exit_does_not_end_the_loop(name):
    hook = make_hook(f"{HERE}.{name}", "custom_rm_path")
    for call in (lambda: run(hook.awaited(None, Sample(index=3))), lambda: run(hook.awaited_off_loop(None, 1))):
        with pytest.raises(RuntimeError, match=rf"--custom-rm-path '.*{name}' .* called exit\(3\)"):
            call()
    assert run(make_hook(f"{HERE}.coroutine", "custom_rm_path").awaited(None, 4)) == 4  # the loop continues


async def awaits_what_is_cancelled(args: Any, value: Any) -> Any:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    return await task


def raises_cancelled(args: Any, value: Any) -> Any:
    raise asyncio.CancelledError


@pytest.mark.parametrize("name", ["awaits_what_is_cancelled", "raises_cancelled"])
def test_a_cancellation_within_a_hook_is_not_one_of_its_caller(name):
    hook = make_hook(f"{HERE}.{name}", "custom_rm_path")
    said = rf"--custom-rm-path '.*{name}' .* let a CancelledError out, for sample index=3 group_index=None though"
    for call in (hook.awaited, hook.awaited_off_loop):
        with pytest.raises(RuntimeError, match=said):
            run(call(None, Sample(index=3)))


async def test_a_hook_that_is_cancelled_by_its_caller_is_cancelled():
    hook = Hook("--flag", "a.b", lambda: asyncio.sleep(60))
    task = asyncio.ensure_future(hook.awaited())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await hook.awaited()


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
        return function(sample)

    return wrapper


@decorated
async def takes_the_sample_only(sample: Sample) -> Sample:
    return sample


async def wants_evaluation(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool) -> Sample:
    sample.response = f"evaluation={evaluation}"
    return sample


def wants_everything(args: Any, sample: Sample, evaluation: bool, rollout_id: int) -> None:
    sample.metadata["seen"] = (evaluation, rollout_id)


async def test_what_is_passed_by_name_may_be_required():
    fn = make_hook(f"{HERE}.wants_evaluation", "custom_generate_function_path")
    assert (await call_generate(fn, None, Sample(), {}, evaluation=True)).response == "evaluation=True"
    args = rollout_args(rollout_sample_hook_path=[f"{HERE}.wants_everything"])
    check_hooks(args)
    assert (await apply_sample_hooks(args, Sample(), rollout_id=5)).metadata["seen"] == (False, 5)


def three_arguments(function: Any) -> Any:
    @functools.wraps(function)
    async def wrapper(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
        return await function(args, sample, sampling_params, evaluation=None)

    return wrapper


@three_arguments
async def generates_with_evaluation(args: Any, sample: Sample, sampling_params: Any, evaluation: Any) -> Sample:
    return sample


async def test_what_is_passed_is_what_a_decorator_takes():
    fn = make_hook(f"{HERE}.generates_with_evaluation", "custom_generate_function_path")
    assert (await call_generate(fn, None, Sample(index=4), {}, evaluation=True)).index == 4


def make_source(args: Any) -> Any:
    return RolloutDataSourceWithBuffer(args)


class Delegating(NoSource):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def test_decorated_functions_factories_and_delegates_are_what_they_are_called_as():
    make_hook(f"{HERE}.takes_the_sample_only", "custom_generate_function_path")
    make_hook(f"{HERE}.make_source", "data_source_path")
    make_hook(f"{HERE}.Delegating", "data_source_path")
    with pytest.raises(TypeError, match="cannot be called"):
        make_hook(f"{HERE}.takes_the_sample_only", "custom_rm_path")


def test_an_odd_exception_of_a_thread_is_still_reported():
    async def stops() -> None:
        await in_thread(lambda: next(iter(())))

    with pytest.raises(RuntimeError, match="StopIteration"):
        run(stops())


# Each hook of the rollout manager, in both forms


def sample_hook(args: Any, sample: Sample, rollout_id: int | None = None) -> Sample | None:
    sample.metadata["seen"] = rollout_id
    return None


async def sample_hook_with_all(args: Any, sample: Sample, **kwargs: Any) -> Sample:
    return Sample(index=sample.index, metadata={**sample.metadata, **kwargs})


def bad_sample_hook(args: Any, sample: Sample) -> Any:
    return "done"


async def test_sample_hooks_of_both_forms_in_flag_order_keep_the_nesting():
    nested = [[Sample(index=0), Sample(index=1)], Sample(index=2), [[Sample(index=3)]]]
    args = rollout_args(rollout_sample_hook_path=[f"{HERE}.sample_hook", f"{HERE}.sample_hook_with_all"])
    found = await apply_sample_hooks(args, nested, rollout_id=5, evaluation=True)
    assert [[s.index for s in found[0]], found[1].index, [[s.index for s in found[2][0]]]] == [[0, 1], 2, [[3]]]
    assert found[2][0][0].metadata == {"seen": 5, "rollout_id": 5, "evaluation": True}
    set_current_rollout_id(9)
    assert (await apply_rollout_sample_hooks(args, Sample())).metadata["rollout_id"] == 9
    set_current_rollout_id(None)
    args = rollout_args(rollout_sample_hook_path=[f"{HERE}.bad_sample_hook"])
    message = r"--rollout-sample-hook-path .*bad_sample_hook' \(.*test_hooks.py:\d+\) returned str 'done', for sample "
    with pytest.raises(TypeError, match=message + "index=2 group_index=None; expected a Sample, or None"):
        await apply_sample_hooks(args, [[Sample(index=2)]])


def rollout_plain(args: Any, rollout_id: int, anything: Any, evaluation: bool = False) -> Any:
    return {"set": {"rewards": [1.0]}} if evaluation else [[Sample(index=rollout_id)]]


async def rollout_coroutine(args: Any, rollout_id: int, anything: Any, evaluation: bool = False) -> Any:
    assert asyncio.get_running_loop() is get_async_loop()  # where the default rollout's functions can be awaited
    return rollout_plain(args, rollout_id, anything, evaluation=evaluation)


@pytest.mark.parametrize("name", ["rollout_plain", "rollout_coroutine"])
def test_rollout_functions_of_both_forms(name):
    hook = make_hook(f"{HERE}.{name}", "rollout_function_path")
    assert call_rollout_fn(hook, None, 4, None, evaluation=False) == RolloutFnTrainOutput([[Sample(index=4)]])
    assert call_rollout_fn(hook, None, 4, None, evaluation=True) == RolloutFnEvalOutput({"set": {"rewards": [1.0]}})


@pytest.mark.parametrize(
    ("returned", "evaluation", "message"),
    [
        (None, False, "returned NoneType with evaluation=False; expected RolloutFnTrainOutput or list"),
        ([[Sample(), "text"]], False, "returned str 'text' in group 0 of 1; expected lists of Sample"),
        (RolloutFnTrainOutput(samples=7), False, "returned int as its samples; expected a list of groups"),  # type: ignore[arg-type]
        ([], True, "returned list with evaluation=True; expected RolloutFnEvalOutput or dict"),
        ({"sums": {"reward": [1]}}, True, r"returned the keys \['reward'\] for evaluation data set 'sums'; expected"),
        ({"sums": [1.0]}, True, "returned list for evaluation data set 'sums'"),
    ],
)
def test_what_rollout_functions_must_not_return(returned, evaluation, message):
    hook = Hook("--rollout-function-path", "my.fn", lambda *a, evaluation: returned)
    with pytest.raises(TypeError, match=rf"--rollout-function-path 'my.fn' \(.*test_hooks.py:\d+\) {message}"):
        call_rollout_fn(hook, None, 0, None, evaluation=evaluation)


async def keep_some(args: Any, group: list[Sample], **kwargs: Any) -> bool:
    await asyncio.sleep(0)
    return group[0].index == 1


def forgets_to_return(args: Any, group: list[Sample], **kwargs: Any) -> Any:
    group[0].metadata["looked_at"] = True


async def test_dynamic_filters_of_both_forms():
    hook = make_hook(f"{HERE}.keep_some", "dynamic_sampling_filter_path")
    for function in (hook, keep_some):
        for index in (0, 1):
            group = [Sample(index=index)]
            assert (await await_dynamic_filter(function, None, group)).keep == (index == 1)
            assert call_dynamic_filter(function, None, group).keep == (index == 1)  # blocks, on the loop's own thread
    assert (await await_dynamic_filter(None, None, [])).keep
    hook = make_hook(f"{HERE}.forgets_to_return", "dynamic_sampling_filter_path")
    message = r"--dynamic-sampling-filter-path .* returned None, for sample index=6 .*; expected a bool or a Dynamic"
    with pytest.raises(TypeError, match=message):
        call_dynamic_filter(hook, None, [Sample(index=6)])
    with pytest.raises(TypeError, match=message):
        await await_dynamic_filter(hook, None, [Sample(index=6)])


# Generate functions
