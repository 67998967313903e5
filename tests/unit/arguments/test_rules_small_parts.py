"""Parts of the rules against slow versions of the same."""

from __future__ import annotations

import itertools
from argparse import Namespace

import pytest

from slime.arguments import ArgumentError
from slime.arguments.command_line import flags_where
from slime.arguments.rules import data, debug, parallelism, rollout
from slime.arguments.rules.placement import parse_address
from tests.support.arguments import run_args


def accepted(rule, *arguments):
    try:
        rule(*arguments)
    except ArgumentError:
        return False
    return True


@pytest.mark.parametrize("layers", range(1, 9))
def test_layers_divide_over_stages_as_they_do_when_they_are_dealt_out(layers):
    sizes = (None, 1, 2, 3)
    for stages, first, last, virtual in itertools.product((2, 3, 4), sizes, sizes, (1, 2)):
        args = Namespace(
            num_layers=layers,
            pipeline_model_parallel_size=stages,
            decoder_first_pipeline_num_layers=first,
            decoder_last_pipeline_num_layers=last,
            account_for_embedding_in_pipeline_split=False,
            account_for_loss_in_pipeline_split=False,
        )
        possible = _deal(layers, stages, first, last, virtual)
        given = (layers, stages, first, last, virtual)
        assert accepted(parallelism._check_stage_layers, args, virtual) == possible, given


def _deal(layers, stages, first, last, virtual):
    """Return True if some number of layers for the stages without a given size uses up all layers, in whole chunks."""
    open_stages = stages - (first is not None) - (last is not None)
    for size in range(1, layers + 1):
        per_stage = [first or size, *[size] * (stages - 2), last or size]
        if sum(per_stage) == layers and all(n % virtual == 0 for n in per_stage):
            return True
        if open_stages == 0:
            break
    return False


def test_slices_are_refused_when_they_hold_no_row_of_any_file():
    bounds = (None, -7, -2, -1, 0, 1, 2, 7)
    for start, stop in itertools.product(bounds, bounds):
        text = f"f.jsonl@[{'' if start is None else start}:{'' if stop is None else stop}]"
        holds_rows = any(list(range(rows))[start:stop] for rows in range(30))
        assert accepted(data._path_of, "--prompt-data", text) == holds_rows, text


@pytest.mark.parametrize("text", ["f.jsonl@[1]", "f.jsonl@[a:b]", "f.jsonl@[1:2:3]", "f.jsonl@[1:2", "f.jsonl[1:2]"])
def test_what_is_no_slice_is_refused(text):
    with pytest.raises(ArgumentError, match=r"expected a slice like path@\[0:100\]"):
        data._path_of(f"--prompt-data {text}", text)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:30000", ("10.0.0.1", 30000)),
        ("http://host-1.cluster:80", ("host-1.cluster", 80)),
        ("http://host:80/", ("host", 80)),
        ("[fe80::1]:30000", ("[fe80::1]", 30000)),
        ("http://[::1]:1", ("[::1]", 1)),
    ],
)
def test_addresses(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text",
    ["host", "host:", ":80", "https://host:80", "host:0", "host:65536", "fe80::1:80", "host:80/v1", "a b:80", ""],
)
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ValueError, match="expected host:port"):
        parse_address(text)


def test_templates_that_pass_can_be_filled_in():
    values = {"rollout_id": 7, "rank": 1, "role": "actor", "step_id": 2}
    templates = {flag.dest: flag.traits.template for flag in flags_where(lambda traits: traits.template)}
    nothing = {"advantage_estimator": "grpo", "num_rollout": 2, "num_steps_per_rollout": 2, **dict.fromkeys(templates)}
    assert len(templates) == 7
    for attribute, template_of in templates.items():
        known, needed, example = template_of.names, template_of.needed, template_of.example
        names = [f"{{{name}}}" for name in (*known, "epoch")]
        for count in range(len(names) + 1):
            for chosen in itertools.combinations(names, count):
                template = "d/" + "_".join(chosen) + ".pt"
                args = Namespace(**{**nothing, attribute: template})
                unknown = "{epoch}" in chosen
                absent = any(f"{{{name}}}" not in chosen for name in needed)
                assert accepted(debug.check_templates, args) == (not unknown and not absent), template
                if not unknown:
                    template.format(**{name: values[name] for name in known})
        assert accepted(debug.check_templates, Namespace(**{**nothing, attribute: example}))
    with_critic = {**nothing, "advantage_estimator": "ppo", "ci_save_grad_norm": "{rollout_id}_{step_id}.pt"}
    with pytest.raises(ArgumentError, match=r"no \{role\} in it, so every role would overwrite the last one"):
        debug.check_templates(Namespace(**with_critic))


@pytest.mark.parametrize(
    ("rollouts", "batch", "steps", "template", "is_accepted"),
    [
        (1, 4, None, "norm.pt", True),
        (1, None, 1, "norm.pt", True),
        (1, 2, None, "norm.pt", False),
        (1, None, 2, "norm.pt", False),
        (2, 4, None, "norm.pt", False),
        (2, 4, None, "{rollout_id}.pt", True),
        (2, 2, None, "{rollout_id}.pt", False),
    ],
)
def test_one_gradient_norm_needs_one_file(rollouts, batch, steps, template, is_accepted):
    """A rollout is 4 x 1 samples, so a batch of 4 is one step."""
    args = run_args(
        num_rollout=rollouts, global_batch_size=batch, num_steps_per_rollout=steps, ci_save_grad_norm=template
    )
    assert accepted(debug.check_templates, args) == is_accepted


def test_top_p_needs_engines_that_report_masks():
    args = run_args(rollout_top_p=0.9)
    rollout.check_top_p(args)
    args.sglang_sampling_mask_max_tokens = None  # as with an SGLang that has no such flag
    with pytest.raises(ArgumentError, match="the installed SGLang does not report that"):
        rollout.check_top_p(args)
