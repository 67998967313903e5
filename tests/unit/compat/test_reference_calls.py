"""Public names are called as code written for slime <= 0.3.1 calls them: by position and all by keyword."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing.process
import warnings
from collections.abc import Iterator

import pytest
import torch

from slime.backends.megatron_utils import cp_utils
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses, get_values
from slime.utils import accelerator, http_utils
from slime.utils.misc import SingletonMeta
from slime.utils.moved import also_named
from slime.utils.ppo_utils import calculate_log_probs_and_entropy
from tests.support.imports import ROOT
from tests.support.public_surface import Name, parse_call, read_table
from tests.support.reference_calls import Call, forms, named, perform
from tests.unit.compat import helpers, losses, rewards, samples, services, wholes
from tests.unit.compat.test_rollout_calls import MAKERS

TABLES = (losses, samples, rewards, helpers, services, wholes)
CALLS: list[Call] = [call for table in TABLES for call in table.CALLS]
ROWS = {row.path: row for row in read_table()}


@pytest.fixture(autouse=True)
def _nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the process after each call: patches, the client, singletons, the accelerator."""
    monkeypatch.setattr(http_utils, "_http_client", None)
    yield
    while wholes.PATCHES:
        wholes.PATCHES.pop().undo()
    SingletonMeta.clear_instances()
    accelerator.reset_accelerator()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "form"),
    [pytest.param(call, form, id=f"{call.path}-{form}") for call in CALLS for form in forms(ROWS[call.path])],
)
def test_calls_in_the_reference_form(call: Call, form: str) -> None:
    perform(ROWS[call.path], call, form)


RAY = "tests/unit/ray/"
OLD_PATHS = (  # the same objects as at their homes, which test_old_paths.py checks
    "slime.ray.utils.",
    "slime.backends.megatron_utils.misc_utils.",
    "slime.backends.sglang_utils.sglang_engine.",
    "slime.backends.sglang_utils.server_control.",
    "slime.observability.metric_utils.compute_rollout_step",
    "slime.observability.metric_utils.has_repetition",
    "slime.utils.tensor_backper.",
)
GENERATOR = "slime_plugins.rollout_buffer.generator.base_generator."
OLDER_METHODS = (
    "async_init_weight_update_connections", "async_init", "async_update_weights", "async_save_model", "async_offload",
    "async_onload", "connect",
)  # fmt: skip
CALLED_IN: dict[str, str] = {
    "slime.ray.placement_group.create_actor_group": RAY + "test_older_drivers.py",
    "slime.ray.placement_group.create_rollout_group": RAY + "test_older_drivers.py",
    "slime.ray.placement_group.allocate_train_group": RAY + "test_older_drivers.py",
    "slime.ray.placement_group.": RAY + "test_placement_group.py",
    **dict.fromkeys(
        (f"slime.ray.train_group.RayTrainGroup.{name}" for name in OLDER_METHODS), RAY + "test_older_drivers.py"
    ),
    "slime.ray.train_group.RayTrainGroup": RAY + "test_rollout_handle.py",
    "slime.ray.rollout.RolloutManager": RAY + "test_manager_and_engines.py",
    "train.train": "tests/unit/test_driver.py",
    "train_async.train": "tests/unit/test_driver.py",
    "slime_plugins.models.": "tests/integration/test_model_families.py",
    "slime.observability.logging_utils.": "tests/unit/observability/test_tracking.py",
    "slime.observability.tensorboard_utils.": "tests/unit/test_old_names.py",
    "slime.utils.wandb_utils.": "tests/unit/test_old_names.py",
    "slime.backends.megatron_utils.update_weight_utils.named_parameters": "tests/unit/test_old_names.py",
    "slime.utils.external_utils.command_utils.fp8_cast_bf16": "tests/unit/launch/test_fp8_checkpoint.py",
    "slime.utils.external_utils.command_utils.": "tests/unit/launch/test_command_utils.py",
    "slime.utils.arguments.slime_validate_args": "tests/unit/arguments/test_rules.py",
    "slime.utils.arguments.parse_args": "tests/unit/arguments/test_command_line.py",
    "slime.utils.eval_config.build_eval_dataset_configs": "tests/unit/utils/test_eval_config.py",
    "slime.utils.processing_utils.process_vision_info": "tests/unit/utils/test_processing_utils.py",
    "slime.rollout.rm_hub.ifbench.": "tests/unit/rollout/test_ifbench.py",
    "slime.rollout.on_policy_distillation.reward_func": "tests/unit/rollout/test_on_policy_distillation.py",
    "slime.rollout.sglang_rollout.GenerateState.submit_generate_tasks": "tests/unit/rollout/test_generate_state.py",
    "slime.rollout.fully_async_rollout.AsyncRolloutWorker.start": "tests/unit/rollout/test_fully_async_rollout.py",
    "slime.ray.actor_group.": RAY + "test_rollout_handle.py",
    "slime.ray.ray_actor.": "tests/unit/utils/test_old_paths.py",
    "slime.backends.megatron_utils.megatron_to_hf.": "tests/unit/utils/test_old_paths.py",
    "slime.utils.memory_utils.": "tests/unit/utils/test_old_paths.py",
    "slime.utils.distributed_utils.": "tests/unit/utils/test_old_paths.py",
    "slime.utils.flops_utils.": "tests/unit/utils/test_old_paths.py",
    "slime.utils.external_utils.typer_utils.": "tests/unit/launch/test_typer_utils.py",
    "slime.observability.metric_utils.compute_statistics": "tests/unit/utils/test_old_paths.py",
    **dict.fromkeys(
        (
            "slime.observability.timer.",
            "slime.observability.metric_utils.compute_pass_rate",
            "slime.observability.metric_utils.compression_ratio",
            "slime.observability.rollout_metrics.",
        ),
        "tests/unit/utils/test_old_metrics.py",
    ),
    **dict.fromkeys(OLD_PATHS, "tests/data/old_paths.tsv"),
    **dict.fromkeys(
        (f"{GENERATOR}{name}" for name in ("BaseGenerator.send", "query_single_turn", "get_rule")),
        "tests/unit/slime_plugins/test_base_generator.py",
    ),
    f"{GENERATOR}run_rollout": "tests/unit/slime_plugins/test_buffer_server.py",
    "slime.backends.megatron_utils.data.": "tests/unit/backends/megatron_utils/test_data_iterator.py",
    "slime_plugins.rollout_buffer.": "tests/unit/slime_plugins/test_rollout_buffer.py",
}
"""Names (or what they begin with) whose calls need Ray, engines or a whole set-up, and where those are made."""
ABSTRACT = {"slime.rollout.data_source.DataSource"}
CALLABLE = ("function", "coroutine", "class", "method")
OTHERS = "slime.agent."  # have a table of their own


def is_the_new_name(row: Name) -> bool:
    """Return True if an old name is a mere path to the new one, which has its own row."""
    home, _, name = row.note.rpartition(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return row.state == "old" and row.load() is getattr(importlib.import_module(home), name)


def test_every_public_callable_is_called() -> None:
    called = {call.path for call in CALLS} | set(MAKERS)
    missing = [
        path
        for path, row in ROWS.items()
        if row.kind in CALLABLE and path not in called | ABSTRACT and not path.startswith((OTHERS, *CALLED_IN))
        if not is_the_new_name(row)
    ]
    assert missing == []


def test_every_reason_is_needed_and_names_a_test() -> None:
    called = {call.path for call in CALLS} | set(MAKERS)
    seen: set[str] = set()
    for prefix, where in CALLED_IN.items():
        excused = [row for path, row in ROWS.items() if path.startswith(prefix) and path not in called | seen]
        seen |= {row.path for row in excused}
        text = (ROOT / where).read_text()
        by_flag = prefix == "slime_plugins.models."  # --spec names them in the families' argument files
        absent = [row.path for row in excused if row.kind in CALLABLE and row.leaf not in text and not by_flag]
        assert (bool(excused), absent) == (True, []), prefix


def test_every_argument_that_users_give_is_given() -> None:
    given: dict[str, set[str]] = {}
    for call in CALLS:
        if not callable(call.given):
            given.setdefault(call.path, set()).update(call.given)
        else:
            given.setdefault(call.path, set()).update(arguments_of(call))
    missing = {path: named(parse_call(ROWS[path].call)) - names for path, names in given.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def arguments_of(call: Call) -> set[str]:
    arguments = call.arguments()
    for value in arguments.values():
        if inspect.iscoroutine(value):
            value.close()
        elif isinstance(value, multiprocessing.process.BaseProcess):
            value.kill()
    return set(arguments)


PADDED = {"qkv_format": "bshd"}


@pytest.mark.parametrize(
    "call",
    [
        lambda: cp_utils.get_sum_of_sample_mean([3], [2], [torch.ones(2)], max_seq_lens=[8], **PADDED),
        lambda: cp_utils.get_logits_and_tokens_offset_with_cp(3, 2, max_seq_len=8, **PADDED),
        lambda: cp_utils.slice_with_cp(torch.ones(3), 0, max_seq_len=8, **PADDED),
        lambda: cp_utils.slice_log_prob_with_cp([0.5, 0.5], 3, 2, max_token_len=8, **PADDED),
    ],
)
def test_a_row_per_sample_is_refused_by_name(call) -> None:
    with pytest.raises(ValueError, match=r"qkv_format='bshd': expected 'thd'; .* leave both arguments out"):
        call()


@pytest.mark.parametrize(
    "function", [get_log_probs_and_entropy, lambda *a, **k: list(get_responses(*a, **k)), get_values]
)
def test_a_row_per_sample_is_refused_by_shape(function) -> None:
    given = losses.sample(logits=torch.zeros(2, 8, 1), max_seq_lens=[8, 8])
    with pytest.raises(ValueError, match=r"one row of packed samples, \[1, T, ...\], got \(2, 8, 1\)"):
        function(given.pop("logits"), **given)


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    given = losses.two_rows(log_prob_keep_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"log_prob_keep_mask: expected the shape \(2, 2\), got \(2, 3\)"):
        calculate_log_probs_and_entropy(**given)


def test_what_is_not_kept_gets_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    keep = torch.tensor([[True, False, False]])
    log_probs, entropy = calculate_log_probs_and_entropy(logits, torch.tensor([1]), None, log_prob_keep_mask=keep)
    assert entropy is None
    log_probs.sum().backward()
    share = torch.softmax(torch.tensor([1.0, 2.0]), 0)[1]
    torch.testing.assert_close(logits.grad, torch.tensor([[share - 1, 1 - share, 0.0]]))


def test_one_parameter_under_two_names_is_an_error() -> None:
    @also_named(data_buffer="data_source")
    def rollout(args: int, data_source: int) -> int:
        return args + data_source

    assert rollout(1, 2) == rollout(1, data_buffer=2) == rollout(1, data_source=2) == 3
    with pytest.raises(TypeError, match="one parameter under two names: data_source, data_buffer"):
        rollout(1, data_source=2, data_buffer=3)
