"""The run's hooks and rewards.

Every hook is looked up and its signature compared; custom rewards are called once, built-in ones grade a label of each
kind, and the services that generation needs are asked once.
"""

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
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.algorithms.reward_types import RewardType, reward_type
from slime.arguments.args import Args
from slime.arguments.files.environments import environments_of
from slime.preflight.look import Findings
from slime.preflight.look.data import PromptFile, first_rows, prompt_files
from slime.rollout.environments.environment import Environment
from slime.rollout.hooks.contracts import ENVIRONMENT, Contract, contracts_of
from slime.rollout.hooks.hook import Hook, checked_hook, in_thread, is_coroutine_function, make_hook
from slime.rollout.outages import with_users_line
from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.labels import accepted_answers
from slime.utils.misc import load_function
from slime.utils.prompt_files import read_file
from slime.utils.types import Sample
from slime.utils.user_code import root_cause, users_line

DEADLINE_S = 10.0
CONNECT_S = 3.0
_LONG_ANSWER = 200
_THINKING_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json")
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


# Labels: one of each kind in a prompt file is graded against itself, as the best answer that a model could give


def look_at_labels(args: Args, samples: Mapping[str, Sample], found: Findings) -> None:
    """Report labels with which every answer would get reward 0, for each file of ``samples`` that a rule grades."""
    if args.debug_train_only:
        return
    for file in prompt_files(args):
        first = samples.get(file.flag)
        if first is None or (args.custom_rm_path if first.custom_rm_path is None else first.custom_rm_path):
            continue
        if is_filled_in_later(args, first):
            continue
        found.begins(f"the labels of {file}")
        seen: set[tuple[Any, ...]] = set()
        for number, label, metadata in _labels(file):
            rule = reward_type(str(metadata.get("rm_type") or args.rm_type or ""))
            if rule is None or not rule.rule:
                continue
            key = (rule.name, _kind_of_label(label))
            if key in seen:
                continue
            if rule.name not in {name for name, _ in seen}:
                _look_at_rule(args, file, rule, first, found)
            seen.add(key)
            if not _look_at_label(f"{file} row {number}", file, rule, label, metadata, found):
                break


def _labels(file: PromptFile) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """Number, label and metadata of the first rows."""
    label_key = next(column for name, column in file.columns.items() if "label" in name)
    for number, row in enumerate(read_file(first_rows(file.path))):
        metadata = row.get(file.columns["metadata"] or "")
        metadata = metadata if isinstance(metadata, dict) else {}
        if file.dataset is not None:
            metadata = file.dataset.inject_metadata(metadata)
        yield number, None if label_key is None else row.get(label_key), metadata


def _kind_of_label(label: object) -> tuple[Any, ...]:
    text = str(label).strip()
    return type(label).__name__, text[:1] in "[{\"'", "####" in text, "\\boxed" in text, len(text) > _LONG_ANSWER


def _look_at_rule(args: Args, file: PromptFile, rule: RewardType, first: Sample, found: Findings) -> None:
    """Check the parts that do not depend on the label: a key for rewards that have none, reasoning without an end."""
    key = (args.eval_reward_key or args.reward_key) if file.dataset is not None else args.reward_key
    converted = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    if not rule.numbers and key is not None and not converted:
        found.errors.append(
            f"{file}: --rm-type {rule.name} gives numbers; leave out --reward-key {key}, which names an entry"
        )
    if rule.after_reasoning and not _reasons(args, first):
        found.warnings.append(
            f"{file}: --rm-type {rule.name} grades what follows </think> or ###Response, and gives 0 to a response "
            f"with neither; no file of --hf-checkpoint {args.hf_checkpoint} and no prompt has such a marker. For a "
            "model that does not write one use --rm-type math"
        )


def _reasons(args: Args, first: Sample) -> bool:
    if any(marker in str(first.prompt) for marker in ("think>", "###Response")):
        return True
    files = [Path(args.hf_checkpoint or "") / name for name in _THINKING_FILES]
    there = [file for file in files if file.is_file()]
    return not there or any(b"</think>" in file.read_bytes() for file in there)


def _look_at_label(
    where: str, file: PromptFile, rule: RewardType, label: object, metadata: Mapping[str, Any], found: Findings
) -> bool:
    """Report what is wrong with a label; False for an error, of which one is enough."""
    if rule.labels and label is None:
        option = "--eval-label-key or --label-key" if file.dataset is not None else "--label-key"
        found.errors.append(
            f"{where}: --rm-type {rule.name} compares answers with labels, and this row has none; name their column "
            f"with {option}"
        )
        return False
    said = f"{where}: --rm-type {rule.name} and the label {label!r:.120}, a {type(label).__name__}"
    try:
        answers = rules.best_answers(rule.name, label, metadata)
        right = any(_is_right(rules.grade(rule.name, answer, label, metadata)) for answer in answers)
    except ImportError:
        return True  # refused by the flag's rule, or not on this machine
    except Exception as e:  # noqa: BLE001  (reported)
        found.errors.append(f"{said}: {type(e).__name__}: {e}")
        return False
    if not right and answers:
        found.warnings.append(
            f"{said}: the label itself, given as the answer, gets no full reward, so no answer may. Labels can be a "
            "final answer (42, \\frac{1}{2}, B), a text that ends in '#### 42' or has a \\boxed{}, a list of accepted "
            "answers, or an object with ground_truth"
        )
    elif rule.answer != "text" and all(len(text) > _LONG_ANSWER for text in accepted_answers(label)):
        found.warnings.append(
            f"{said}: it has {len(str(label))} characters, as a solution has; answers are compared with a final "
            "answer, so end it in '#### ANSWER', box the answer, or give the answer alone"
        )
    return True


def _is_right(reward: object) -> bool:
    return bool(reward["acc"] if isinstance(reward, dict) else reward == 1)


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
