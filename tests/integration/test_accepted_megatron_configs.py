"""Configurations that the command line accepts pass Megatron's own checks of sizes, stages and rank groups too."""

from __future__ import annotations

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from slime.arguments import ArgumentError, finalize_for_device
from slime.arguments.command_line import all_flags, build_parser
from slime.arguments.parse import resolve
from slime.backends.megatron_utils.model.provider import transformer_config_from_args
from tests.support.command_lines import command_lines, with_files


def test_configs_stages_and_groups_are_made(tmp_path):
    assert run(tmp_path, 300, derandomize=True) > 30


@pytest.mark.soak
def test_two_thousand(tmp_path):
    assert run(tmp_path, 2000, derandomize=False) > 400


def run(folder: Path, max_examples: int, *, derandomize: bool) -> int:
    """Build what Megatron builds from sizes for random accepted command lines; return how many there were."""
    flags = all_flags()
    parser = build_parser(flags)
    accepted = 0

    @settings(
        max_examples=max_examples, deadline=None, derandomize=derandomize, database=None, print_blob=not derandomize,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(command_lines())
    def accepted_lines_make_a_model(line: str) -> None:
        nonlocal accepted
        words = [word for word in shlex.split(line) if word not in ("--bf16", "--fp16")]  # they need a GPU
        try:
            args = resolve(with_files(words, folder), flags, parser)
            finalize_for_device(args, "cpu")
        except ArgumentError:
            return
        if args.debug_rollout_only:
            return
        accepted += 1
        check_stages(args, transformer_config_from_args(args))
        check_groups(args)

    accepted_lines_make_a_model()
    print(f"{accepted} configurations")
    return accepted


def check_stages(args: Namespace, config: Any) -> None:
    """Every layer is on one (virtual) stage."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    virtual = config.virtual_pipeline_model_parallel_size
    stages = [None] if virtual is None else range(virtual)
    layers = [
        get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
        for rank in range(config.pipeline_model_parallel_size)
        for stage in stages
    ]
    assert sum(layers) == args.num_layers
    assert min(layers) >= 0


def check_groups(args: Namespace) -> None:
    """The groups of ranks of ``initialize_model_parallel``, for experts and for the rest."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    ep = args.expert_model_parallel_size
    etp = tp if args.expert_tensor_parallel_size is None else args.expert_tensor_parallel_size
    rest = RankGenerator(tp=tp, ep=1, dp=args.data_parallel_size, pp=pp, cp=cp, order=order)
    expert = RankGenerator(tp=etp, ep=ep, dp=args.world_size // (etp * ep * pp), pp=pp, cp=1, order=order)
    assert rest.world_size == expert.world_size == args.world_size
    assert rest.get_ranks("pp") == expert.get_ranks("pp")
