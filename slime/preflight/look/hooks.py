"""The run's hooks: each is looked up and its signature compared, custom rewards are called once, and the
services that they need are asked once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import math
import numbers
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from slime.algorithms.reward_types import reward_type
from slime.arguments.args import Args
from slime.arguments.files.environments import environments_of
from slime.preflight.look import Findings
from slime.rollout.environments.environment import Environment
from slime.rollout.hooks.contracts import ENVIRONMENT, Contract, contracts_of
from slime.rollout.hooks.hook import Hook, checked_hook, in_thread, is_coroutine_function, make_hook
from slime.rollout.outages import with_users_line
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime.utils.user_code import root_cause, users_line

DEADLINE_S = 10.0
CONNECT_S = 3.0
ANSWER = "The answer is \\boxed{42}."
_GIVES_REWARDS_ANOTHER_FORM = ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path")


_NOT_HERE = (
    "torch",
    "ray",
    "megatron",
    "sglang",
    "sglang_router",
    "transformers",
    "flash_attn",
    "transformer_engine",
    "triton",
)
"""Packages of a training machine, which one that only plans need not have."""


def look_at_hooks(args: Args, dry_run: bool, found: Findings) -> bool:
    """Report every hook that cannot be imported or called; return whether all can be."""
    good = True
    for path, contract, flag in _named(args):
        found.begins(f"the import of {flag} {path}")
        try:
            checked_hook(path, contract, flag)
        except Exception as e:  # noqa: BLE001  (any error of a user's module is reported)
            good = False
            root = root_cause(e)
            missing = (root.name or "").partition(".")[0] if isinstance(root, ModuleNotFoundError) else ""
            if dry_run and missing in _NOT_HERE:
                found.unchecked.append(f"{flag} {path}: {missing} is not installed on this machine")
                continue
            line = users_line(e)
            found.errors.append(f"{e} (at {line})" if line else str(e))
        except SystemExit as e:
            good = False
            found.errors.append(f"{flag} {path}: importing its module called exit({e.code}) (at {users_line(e)})")
    return good


def _named(args: Args) -> Iterator[tuple[str, Contract, str]]:
    """Every dotted path, how its function is called, and the flag (or place in a file) that names it."""
    replays = args.load_debug_rollout_data is not None
    contracts = {name: c for name, c in contracts_of("manager").items() if not (replays and c.generates)}
    if not args.debug_rollout_only:
        from slime.backends.megatron_utils import import_megatron
        from slime.backends.megatron_utils.train import hooks

        given = {name: contract for name, contract in hooks.CONTRACTS.items() if getattr(args, name, None)}
        if given:
            import_megatron()  # modules of trainer hooks find Megatron as it is in a trainer
        contracts |= given
    for name, contract in contracts.items():
        value = getattr(args, name, None) or []
        for path in [value] if isinstance(value, str) else value:
            yield path, contract, contract.flag
    for entry in environments_of(args).values() if not replays else []:
        yield entry.path, ENVIRONMENT, f"environment {entry.name!r}"
    for dataset in [] if replays or args.eval_interval is None else args.eval_datasets:
        for name in ("custom_generate_function_path", "custom_rm_path"):
            if path := getattr(dataset, name, None):
                yield path, contracts_of("manager")[name], f"--eval-config, data set {dataset.name!r}, {name}"


def look_at_reward(args: Args, samples: Mapping[str, Sample], found: Findings) -> None:
    """Score a made-up answer to the first prompt of each file (``samples``, by its flag), as the run would."""
    if args.debug_train_only:
        return
    calls: dict[str, tuple[Hook, str, Sample]] = {}
    for flag, sample in samples.items():
        path = args.custom_rm_path if sample.custom_rm_path is None else sample.custom_rm_path
        if path and not path.startswith("slime.") and path not in calls:  # those ask servers
            calls[path] = (make_hook(path, "custom_rm_path"), flag, sample)
    for hook, flag, sample in calls.values():
        _look_at_custom(args, hook, sample, found, group=args.group_rm and not flag.startswith("--eval"))


def _look_at_custom(args: Args, hook: Hook, sample: Sample, found: Findings, *, group: bool) -> None:
    found.begins(f"the call of {hook} on a made-up answer")
    answers = [_answer(sample, number) for number in range(args.n_samples_per_prompt if group else 1)]
    try:
        reward = _call(hook, args, answers if group else answers[0])
    except _NoAnswer:
        found.warnings.append(f"{hook} has not scored a made-up answer within {DEADLINE_S:.0f} s")
        return
    except Exception as e:  # noqa: BLE001  (reported)
        root, line = root_cause(e), users_line(e)
        found.warnings.append(
            f"{hook} raised {type(root).__name__}: {root}" + (f" (at {line})" if line else "")
            + f" for a made-up answer to the first prompt, {ANSWER!r}"
        )  # fmt: skip
        return
    problem = _problem(args, reward, len(answers) if group else None)
    if problem is None:
        return
    message = f"{hook} returned {problem}, for a made-up answer to the first prompt, {ANSWER!r}"
    (found.warnings if is_filled_in_later(args, sample) else found.errors).append(message)


def _answer(prompt: Sample, number: int) -> Sample:
    sample = copy.deepcopy(prompt)
    sample.index, sample.group_index, sample.status = number, 0, Sample.Status.COMPLETED
    sample.response, sample.tokens = ANSWER, [0, *range(1, len(ANSWER))]
    sample.response_length = len(ANSWER) - 1
    return sample


class _NoAnswer(Exception):
    pass


def _call(hook: Hook, args: Args, answers: Sample | list[Sample]) -> Any:
    """Call the reward on its own event loop, in a thread: a coroutine function may block it forever."""
    result: concurrent.futures.Future[Any] = concurrent.futures.Future()

    async def score() -> Any:
        return await hook.awaited_off_loop(args, answers)

    def work() -> None:
        try:
            result.set_result(asyncio.run(score()))
        except BaseException as e:  # noqa: BLE001  (raised again where it is waited for)
            result.set_exception(e)

    threading.Thread(target=work, daemon=True).start()
    if not concurrent.futures.wait([result], DEADLINE_S).done:
        raise _NoAnswer
    return result.result()


def is_filled_in_later(args: Args, sample: Sample) -> bool:
    """Return True if functions of the user's may give a sample what the reward reads."""
    return bool(
        args.custom_generate_function_path or sample.generate_function_path or args.rollout_sample_hook_path
        or not args.rollout_function_path.startswith("slime.")
    )  # fmt: skip


def _problem(args: Args, reward: object, count: int | None) -> str | None:
    """Return what was returned and what was expected; None for what can be a reward."""
    if count is not None:
        if not isinstance(reward, (list, tuple)) or len(reward) != count:
            return f"{_shown(reward)} and must return a list of {count} rewards (--group-rm)"
        return next((problem for one in reward if (problem := _problem(args, one, None))), None)
    if any(getattr(args, name) for name in _GIVES_REWARDS_ANOTHER_FORM):
        return None
    if isinstance(reward, Mapping):
        if args.reward_key is None:
            return f"{_shown(reward)}; --reward-key must say which of its entries is the reward"
        if args.reward_key not in reward:
            return f"{_shown(reward)}, which has no entry --reward-key {args.reward_key}"
        reward = reward[args.reward_key]
    elif args.reward_key is not None:
        return f"{_shown(reward)}; with --reward-key {args.reward_key} a dict is expected"
    if not _is_number(reward):
        return f"{_shown(reward)}; a finite number is expected"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, numbers.Real) or hasattr(value, "item"):  # those of NumPy and PyTorch too
        try:
            return math.isfinite(float(value))
        except (TypeError, ValueError):
            return False
    return False


def _shown(value: object) -> str:
    return "nothing (None)" if value is None else f"{type(value).__name__} {value!r:.80}"


# The services that generation needs and slime does not run


def look_at_services(args: Args, dry_run: bool, found: Findings) -> None:
    """Report servers of rewards that take no connection, and what ``check`` of the environments raises."""
    if args.debug_train_only or args.load_debug_rollout_data is not None:
        return
    checked = {entry.name: entry for entry in environments_of(args).values() if _has_check(entry.path)}
    urls = set(_reward_urls(args))
    if dry_run:
        found.unchecked += [f"whether {url} answers (--rm-url)" for url in sorted(urls)]
        found.unchecked += [f"environment {name!r}: its check is made before a run" for name in checked]
        return
    for url in sorted(urls):
        found.begins(f"the connection to --rm-url {url}")
        if (why := _unreachable(url)) is not None:
            found.warnings.append(
                f"--rm-url {url} takes no connection ({why}): the run starts, and waits for it for "
                f"--service-outage-timeout {args.service_outage_timeout:g} s"
            )
    for name, entry in checked.items():
        found.begins(f"the check of environment {name!r}")
        try:
            asyncio.run(_check(load_function(entry.path), args, entry.options))
        except TimeoutError:
            found.errors.append(f"environment {name!r}: its check took more than {DEADLINE_S:g} s")
        except Exception as e:  # noqa: BLE001  (any error of a user's check is reported)
            found.errors.append(f"environment {name!r}: its check raised {with_users_line(e)}")


def _has_check(path: str) -> bool:
    own = inspect.getattr_static(load_function(path), "check", None)  # a method of the same name is another thing
    return isinstance(own, (classmethod, staticmethod)) and own is not Environment.__dict__["check"]


async def _check(kind: Any, args: Args, options: Mapping[str, Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        if is_coroutine_function(kind.check):
            await kind.check(args, options)
        else:
            await in_thread(kind.check, args, options)


def _reward_urls(args: Args) -> Iterator[str]:
    kinds = [args.rm_type, *(getattr(dataset, "rm_type", None) for dataset in args.eval_datasets)]
    asks = any(entry.needs_url for kind in kinds if (entry := reward_type(kind)))
    if asks and args.custom_rm_path is None and args.rm_url:
        yield args.rm_url


def _unreachable(url: str) -> str | None:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S):
            return None
    except (OSError, ValueError) as e:
        return str(e) or type(e).__name__
