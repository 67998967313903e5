"""Users' functions: found at the start, called in either form, named in every error."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import data_source, either_form, rm_hub, sample_hooks
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn, iter_samples
from slime.rollout.custom_generate import call_generate, generate_hook
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.drawing import draw_groups
from slime.rollout.either_form import finish
from slime.rollout.filter_hub.base_types import await_dynamic_filter, call_dynamic_filter
from slime.rollout.hook_contracts import CONTRACTS
from slime.rollout.hooks import Hook, check_hooks, find_hook, make_hook, place_of
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.errors import RewardErrors
from slime.rollout.rm_hub.failure import BadReward
from slime.rollout.sample_hooks import apply_rollout_sample_hooks, apply_sample_hooks, set_current_rollout_id
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.async_utils import get_async_loop, run
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

HERE = __name__
FILE = __file__


def line_of(function: Any) -> int:
    return int(function.__code__.co_firstlineno)


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
    for name, contract in CONTRACTS.items():
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


def notes_of(caught: Any) -> str:
    return "\n".join(getattr(caught.value, "__notes__", ()))


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
    assert run(make_hook(f"{HERE}.coroutine", "custom_rm_path").awaited(None, 4)) == 4  # the loop goes on


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


def test_a_thread_that_ends_with_an_odd_exception_is_still_told():
    async def stops() -> None:
        await either_form.in_thread(lambda: next(iter(())))

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


def blocking_generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    args.began.set()
    assert args.go.wait(20)
    sample.response = f"evaluation={evaluation}"
    return sample


async def tuple_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    return sample, [Sample(index=8), (Sample(index=9),)]


async def none_generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Any:
    sample.response = "done, and nothing returned"


def gated() -> SimpleNamespace:
    return SimpleNamespace(began=threading.Event(), go=threading.Event())


async def test_a_plain_generate_function_does_not_keep_the_loop():
    args, sample = gated(), Sample(index=1, metadata={"kept": 1})
    fn = make_hook(f"{HERE}.blocking_generate", "custom_generate_function_path")
    call = asyncio.create_task(call_generate(fn, args, sample, {}, evaluation=True))
    await asyncio.to_thread(args.began.wait, 20)  # this line runs, so the loop is free
    args.go.set()
    assert await call is sample
    assert sample.response == "evaluation=True"
    assert sample.metadata == {"kept": 1}


async def test_a_plain_generate_function_that_is_cancelled_changes_nothing_any_more():
    args, sample = gated(), Sample(index=1)
    fn = make_hook(f"{HERE}.blocking_generate", "custom_generate_function_path")
    call = asyncio.create_task(call_generate(fn, args, sample, {}, evaluation=False))
    await asyncio.to_thread(args.began.wait, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    args.go.set()
    for thread in [t for t in threading.enumerate() if t.name == "hook-blocking_generate"]:
        await asyncio.to_thread(thread.join, 20)
    assert sample == Sample(index=1)


async def test_what_generate_functions_return():
    sample = Sample(index=1, group_index=0)
    fn = make_hook(f"{HERE}.tuple_generate", "custom_generate_function_path")
    found = await call_generate(fn, None, sample, {}, evaluation=False)
    assert [found[0].index, found[1][0].index, found[1][1][0].index] == [1, 8, 9]
    assert isinstance(found, list)
    assert isinstance(found[1][1], list)  # all that follows knows lists
    fn = make_hook(f"{HERE}.none_generate", "custom_generate_function_path")
    message = r"--custom-generate-function-path .*none_generate' \(.*:\d+\) returned NoneType, for sample index=1 "
    with pytest.raises(TypeError, match=message + "group_index=0; expected a Sample"):
        await call_generate(fn, None, sample, {}, evaluation=False)


def test_the_generate_function_of_a_sample_wins_and_is_loaded_through_a_patched_loader():
    args = rollout_args(custom_generate_function_path=f"{HERE}.none_generate")
    own = Sample(generate_function_path=f"{HERE}.tuple_generate")
    found = generate_hook(args, own, load_function)
    assert found is not None
    assert found.function is tuple_generate
    assert str(found).startswith("generate_function_path of the sample '")
    assert generate_hook(args, Sample(), load_function).function is none_generate  # type: ignore[union-attr]
    assert generate_hook(args, Sample(), lambda path: path.upper()).function == f"{HERE}.none_generate".upper()  # type: ignore[union-attr]
    assert generate_hook(rollout_args(), Sample(), load_function) is None


async def test_hooks_are_looked_up_through_the_names_that_users_patch(make_args, monkeypatch):
    """With the signature that ``load_function`` is called with by everybody: one path."""
    asked = []

    def load(path: str) -> Any:
        asked.append(path)
        return {"my.filter": newest_first, "my.hook": sample_hook, "my.rm": plain_rm}[path]

    for module in (data_source, sample_hooks, rm_hub):
        monkeypatch.setattr(module, "load_function", load)
    source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path="my.filter"))
    source.add_samples([[Sample(index=i), Sample(index=i)] for i in range(3)])
    assert source.get_samples(1)[0][0].index == 2
    one = await apply_sample_hooks(rollout_args(rollout_sample_hook_path=["my.hook"]), Sample(index=5), rollout_id=1)
    assert one.metadata == {"seen": 1}
    assert await async_rm(rollout_args(custom_rm_path="my.rm"), one) == 5.0
    assert await async_rm(rollout_args(), Sample(index=6, custom_rm_path="my.rm")) == 6.0
    assert asked == ["my.filter", "my.hook", "my.rm", "my.rm"]


def newest_first(args: Any, rollout_id: None, buffer: list[Any], num_samples: int) -> list[Any]:
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


# Rewards


def plain_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    if isinstance(sample, list):
        return [float(s.index) for s in sample]
    return float(sample.index)


async def rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return plain_rm(args, sample)


async def text_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return "1.0"


async def no_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    return None


async def raising_rm(args: Any, sample: Any, **kwargs: Any) -> Any:
    raise KeyError("no judge")


@pytest.mark.parametrize("name", ["plain_rm", "rm"])
async def test_rewards_of_both_forms_for_one_and_for_many(name):
    args = rollout_args(custom_rm_path=f"{HERE}.{name}", group_rm=True)
    samples = [Sample(index=n) for n in (4, 5)]
    assert await async_rm(args, samples[0]) == 4.0
    assert await batched_async_rm(args, samples) == [4.0, 5.0]
    assert await async_rm(rollout_args(), Sample(index=6, custom_rm_path=f"{HERE}.{name}")) == 6.0


async def test_rewards_that_cannot_be_are_named():
    for name, seen in (("text_rm", "str '1.0'"), ("no_rm", "NoneType")):
        args = rollout_args(custom_rm_path=f"{HERE}.{name}")
        message = (
            rf"--custom-rm-path .*{name}' \(.*test_hooks.py:\d+\) returned {seen}, for sample index=3 group_index=1; "
            "expected the reward of one sample, a number or a dict"
        )
        with pytest.raises(TypeError, match=message):
            await async_rm(args, Sample(index=3, group_index=1))
    for later in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        assert await async_rm(rollout_args(custom_rm_path=f"{HERE}.no_rm", **{later: "my.fn"}), Sample()) is None
    with pytest.raises(BadReward, match=r"--custom-rm-path .*returned str '1.0'"):  # no failure to tolerate, a mistake
        await RewardErrors().score_one(rollout_args(custom_rm_path=f"{HERE}.text_rm"), Sample(), async_rm)
    args = rollout_args(custom_rm_path=f"{HERE}.text_rm", group_rm=True)
    with pytest.raises(BadReward, match=r"must return a list"):
        await RewardErrors().score_batch(args, [Sample(), Sample()], batched_async_rm)
    with pytest.raises(ValueError, match=r"--custom-rm-path .*was given 2 samples .* must return a list .* got '1.0'"):
        await batched_async_rm(rollout_args(custom_rm_path=f"{HERE}.text_rm"), [Sample(), Sample()])


async def test_a_failed_reward_says_in_its_sample_s_log_line_which_hook_it_was(caplog):
    errors, sample = RewardErrors(), Sample(index=3, group_index=1)
    await errors.score_one(rollout_args(custom_rm_path=f"{HERE}.raising_rm"), sample, async_rm)
    assert sample.remove_sample
    assert f"in --custom-rm-path '{HERE}.raising_rm' ({FILE}:{line_of(raising_rm)})" in caplog.text


# Data sources


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (None, "returned NoneType.*expected a list of groups"),
        ([Sample(index=1)], "returned Sample .*expected a list of groups"),
        ([[Sample()]], "returned a group of 1 samples; expected --n-samples-per-prompt 2"),
    ],
)
def test_what_a_data_source_hands_out_is_looked_at(groups, message):
    def get_samples(n: int) -> Any:
        return groups

    with pytest.raises(
        (TypeError, ValueError), match=rf"--data-source-path 'my.Source' \(.*test_hooks.py:\d+\).*{message}"
    ):
        draw_groups(rollout_args(data_source_path="my.Source"), get_samples, 3)


def test_an_error_in_a_data_source_names_it():
    def get_samples(n: int) -> Any:
        raise OSError("the prompt file is gone")

    with pytest.raises(OSError, match="gone") as caught:
        draw_groups(rollout_args(data_source_path="my.Source"), get_samples, 3)
    assert "in --data-source-path 'my.Source'" in notes_of(caught)


def test_finish_waits_for_any_awaitable_and_passes_on_the_rest():
    async def slow() -> int:
        await asyncio.sleep(0)
        return 3

    assert finish(3) == 3
    assert finish(slow()) == 3

    async def on_the_loop() -> Any:
        return finish(slow())

    assert run(on_the_loop()) == 3
    assert find_hook(rollout_args(), "custom_rm_path") is None


# Samples of a subclass


@dataclasses.dataclass
class Chat(Sample):
    messages: list[str] = dataclasses.field(default_factory=list)


class ChatSource(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples: int) -> list[Any]:
        groups = super().get_samples(num_samples)
        for group in groups:
            group[:] = [s if isinstance(s, Chat) else Chat(**s.__dict__, messages=[str(s.prompt)]) for s in group]
        return groups


@pytest.mark.parametrize("partial", [False, True])
def test_samples_of_a_subclass_keep_their_class_in_the_rollout_and_in_the_buffer(make_args, tmp_path, partial):
    args = make_args(partial_rollout=partial, over_sampling_batch_size=6, save=str(tmp_path), load=str(tmp_path))
    source = ChatSource(args)
    done = list(iter_samples(generate_rollout(args, 0, source).samples))
    assert {type(s) for s in done} == {Chat}
    assert all(s.messages == [s.prompt] and s.reward is not None for s in done)
    assert {type(Chat(**s.__dict__)) for s in done} == {Chat}  # with the trace that generation gave them
    source.add_samples([[Chat(index=98, messages=["kept"]), Chat(index=99)]])
    source.snapshot(0)
    source.save(0)
    resumed = ChatSource(args)
    resumed.load(0)
    kept = [s for s in iter_samples(resumed.get_samples(20)) if s.index == 98]
    assert [(type(s), s.messages) for s in kept] == [(Chat, ["kept"])]
