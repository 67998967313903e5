"""A command line that is accepted does not fail later: in the schedule, the placement, the engines or the trainer.

What a package refuses when it starts is stated here once more, in terms of its own arguments; with the real Megatron
and SGLang these are tests/integration/test_accepted_megatron_configs.py and test_accepted_engine_configs.py.
"""

from __future__ import annotations

import argparse
import random
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slime.arguments import ArgumentError
from slime.arguments.flag import add_to_parser
from slime.arguments.parse import resolve
from slime.arguments.passthrough import catalog
from slime.arguments.passthrough.sglang import flag_of_record
from slime.arguments.placement import EnginePlan, engines_of, layout_of
from slime.backends.sglang_utils.router import router_fields
from slime.batching.schedule import build_dp_schedule, leftover_positions
from slime.ray.manager.engines.slots import validate_server_group_gpu_indices
from tests.support.arguments import known
from tests.support.command_lines import NOWHERE, command_lines, with_files
from tests.support.engine_commands import engine_commands

pytestmark = pytest.mark.slow

SMALL = (
    f"--dry-run --hf-checkpoint {NOWHERE} --prompt-data p.jsonl --num-rollout 1 --num-layers 4 --hidden-size 64 "
    "--num-attention-heads 4 --vocab-size 100 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --rollout-batch-size 8 "
    "--global-batch-size 8 --max-tokens-per-gpu 40 "
)
# Once accepted, and then an assertion somewhere: (flags added to SMALL, seed of the lengths).
COUNTEREXAMPLES: tuple[tuple[str, int], ...] = (
    ("--rollout-batch-size 15 --global-batch-size 4 --use-dynamic-batch-size --custom-generate-function-path a.b", 4),
    ("--rollout-batch-size 4 --custom-generate-function-path a.b", 0),
    ("--use-dynamic-batch-size --rollout-batch-size 5 --global-batch-size 5", 1),
    ("--recompute-granularity selective --recompute-num-layers 1", 0),
    ("--group-query-attention --num-query-groups 3", 0),
    ("--num-virtual-stages-per-pipeline-rank 2", 0),
    ("--pipeline-model-parallel-size 4 --num-layers 6 --decoder-first-pipeline-num-layers 3 "
     "--num-virtual-stages-per-pipeline-rank 2", 0),
    ("--pipeline-model-parallel-size 2 --num-layers 6 --num-virtual-stages-per-pipeline-rank 2", 0),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 9", 0),
    ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 2", 0),
    ("--pipeline-model-parallel-size 4 --num-layers 8 --num-virtual-stages-per-pipeline-rank 2 "
     "--microbatch-group-size-per-virtual-pipeline-stage 5", 0),
    ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --use-dynamic-batch-size "
     "--rollout-batch-size 2 --global-batch-size 2", 0),
    ("--num-experts 6 --moe-ffn-hidden-size 32 --expert-model-parallel-size 3", 0),
    ("--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 5", 0),
    ("--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 1", 0),
    ("--expert-tensor-parallel-size 3", 0),
    ("--use-tp-pp-dp-mapping --pipeline-model-parallel-size 2 --context-parallel-size 2", 0),
    ("--num-distributed-optimizer-instances 3", 0),
    ("--rollout-num-gpus-per-engine 2 --sglang-ep-size 3", 0),
    ("--sglang-pp-size 2 --rollout-num-gpus-per-engine 2 --sglang-config "
     "'{\"sglang\": [{\"name\": \"a\", \"server_groups\": [{\"num_gpus\": 4, \"num_gpus_per_engine\": 1}]}]}'", 0),
    ("--rollout-num-gpus-per-engine 2 --sglang-dp-size 0", 0),
    ("--rollout-num-gpus 12 --rollout-num-gpus-per-engine 12 --num-gpus-per-node 6 --sglang-pp-size 3", 0),
    ("--colocate --rollout-num-gpus 0 --prefill-num-servers 1", 0),
)  # fmt: skip


def _parse(line: str, folder: Path) -> argparse.Namespace | None:
    """The namespace of an accepted line, None for a refused one. Any exception but ArgumentError is a failure."""
    try:
        return resolve(with_files(shlex.split(line), folder), *known())
    except ArgumentError:
        return None


def check(args: argparse.Namespace, seed: int) -> None:
    """Build everything that is built from sizes after the command line was accepted."""
    rng = random.Random(seed)
    if not args.debug_rollout_only:
        _check_trainer(args)
        _check_schedules(args, rng)
    _check_placement(args)
    if not args.debug_train_only:
        _check_engines(args)


# The trainer


def _check_trainer(args: argparse.Namespace) -> None:
    """Megatron's process groups, layers per stage, and heads and experts per rank are whole numbers."""
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    world = args.actor_num_nodes * args.actor_num_gpus_per_node
    assert world == args.world_size == tp * pp * cp * args.data_parallel_size
    assert world >= 1
    assert args.num_attention_heads % tp == 0
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    assert groups >= 1
    assert args.num_attention_heads % groups == 0
    assert groups % tp == 0 or tp % groups == 0
    assert args.padded_vocab_size % tp == 0
    assert args.kv_channels >= 1
    assert not (args.sequence_parallel and tp == 1)
    _check_stages(args, pp)
    _check_recompute(args)
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size or tp
    assert world % (ep * etp * pp) == 0
    expert_ranks, instances = world // (ep * etp * pp), args.num_distributed_optimizer_instances
    assert not args.use_tp_pp_dp_mapping or pp == 1 or expert_ranks == args.data_parallel_size
    assert args.data_parallel_size * cp % instances == 0
    assert expert_ranks % instances == 0
    if args.num_experts is None:
        assert ep == 1
    else:
        assert args.num_experts >= 1
        assert args.num_experts % ep == 0
        assert 1 <= args.moe_router_topk <= args.num_experts
        assert args.moe_router_topk > 1 or args.moe_router_pre_softmax


def _check_stages(args: argparse.Namespace, pp: int) -> None:
    """Layers of first, middle and last stages: none empty, each a multiple of its virtual stages."""
    vpp = args.virtual_pipeline_model_parallel_size
    assert vpp is None or (vpp > 1 and pp > 1)
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    counted = (args.account_for_embedding_in_pipeline_split, args.account_for_loss_in_pipeline_split)
    ends = [end for end in (first, last) if end is not None]
    assert not (ends and any(counted))
    middle_layers, middle_stages = args.num_layers + sum(counted) - sum(ends), pp - len(ends)
    stages = list(ends)
    if middle_stages:
        assert middle_layers % middle_stages == 0
        stages += [middle_layers // middle_stages] * middle_stages
    else:
        assert middle_layers == 0
    assert all(layers >= 1 and layers % (vpp or 1) == 0 for layers in stages), stages


def _check_recompute(args: argparse.Namespace) -> None:
    if args.recompute_granularity == "full":
        assert args.recompute_method in ("uniform", "block")
        assert args.recompute_num_layers >= 1
    if args.recompute_granularity == "selective":
        assert args.recompute_num_layers is None


# The schedule


def _check_schedules(args: argparse.Namespace, rng: random.Random) -> None:
    """Three rollouts of the promised size, what does not fill a step being carried over; lengths are random."""
    vpp = args.virtual_pipeline_model_parallel_size or 1
    config = {
        "dp_size": args.data_parallel_size,
        "cp_size": args.context_parallel_size,
        "vpp_size": vpp,
        "microbatch_group_size_per_vp_stage": args.microbatch_group_size_per_vp_stage
        or args.pipeline_model_parallel_size,
    }
    trajectories = args.rollout_batch_size * args.n_samples_per_prompt
    fans_out = args.custom_generate_function_path is not None
    carried: list[Any] = []
    for rollout in range(3):
        ids = list(carried)
        for trajectory in range(trajectories):
            ids += [(rollout, trajectory)] * (rng.randint(1, 3) if fans_out else 1)
        longest = rng.choice([1, 30, 300])
        lengths = [rng.choice([longest, rng.randint(1, longest)]) for _ in ids]
        schedule = build_dp_schedule(
            args, config, lengths, global_batch_size=args.global_batch_size, rollout_indices=ids
        )
        carried = [ids[position] for position in leftover_positions(ids, args.global_batch_size)]
        assert sum(map(len, schedule.partitions)) + len(carried) == len(ids)
        for count in schedule.num_microbatches:
            _check_pipeline(args, config, count)
    if args.num_steps_per_rollout is not None:
        assert trajectories == args.global_batch_size * args.num_steps_per_rollout
        assert not carried


def _check_pipeline(args: argparse.Namespace, config: dict[str, int], micro_batches: int) -> None:
    """Megatron's interleaved schedule takes whole groups of at least as many micro-batches as stages."""
    assert micro_batches >= 1
    if config["vpp_size"] > 1:
        group, pp = config["microbatch_group_size_per_vp_stage"], args.pipeline_model_parallel_size
        assert pp <= group <= micro_batches
        assert micro_batches % group == 0


# Placement and engines


def _check_placement(args: argparse.Namespace) -> None:
    layout = layout_of(args)
    assert layout.slots >= 1 or args.rollout_external or not args.rollout_num_gpus
    assert layout.trainer_slots <= layout.slots
    assert layout.rollout_offset + layout.rollout_slots <= layout.slots
    if args.debug_rollout_only:
        assert layout.trainer_slots == 0 or args.rollout_external
    if not args.colocate and layout.rollout_slots:
        assert layout.rollout_offset >= layout.trainer_slots


def _check_engines(args: argparse.Namespace) -> None:
    """The command line of every node of every engine is understood by SGLang's own parser and its sizes fit."""
    if args.rollout_external:
        return
    plans = engines_of(args)
    assert len(plans) == args.rollout_num_engines
    taken = [slot for plan in plans for part in plan.parts() for slot in part]
    kinds = Counter(plan.worker_type for plan in plans)
    assert len(set(taken)) == len(taken)
    if args.sglang_config:
        assert set(taken) <= set(range(layout_of(args).rollout_slots))
        assert (kinds["prefill"] > 0) == (kinds["decode"] > 0)
    else:
        assert taken == list(range(layout_of(args).rollout_slots))
        assert kinds["prefill"] == (args.prefill_num_servers or 0)
        assert (kinds["decode"] > 0) == (kinds["prefill"] > 0)
    if plans and not args.sglang_config:
        validate_server_group_gpu_indices(
            worker_type="regular",
            gpu_offset=0,
            num_gpus_per_engine=plans[0].num_gpus,
            num_gpus_per_engine_on_node=plans[0].num_gpus_on_node,
            num_engines=len(plans) * plans[0].nodes,
            num_available_gpus=layout_of(args).rollout_slots,
            rollout_num_gpus=args.rollout_num_gpus,
            rollout_num_gpus_per_engine=args.rollout_num_gpus_per_engine,
        )
    commands: dict[int, list[list[str]]] = {plan.rank: [] for plan in plans}
    for plan, _, words in engine_commands(args):
        commands[plan.rank].append(words)
    for plan in plans:
        _check_engine(plan, commands[plan.rank])
    router_fields(args, host="127.0.0.1", port=1, pd_disaggregation="prefill" in kinds)
    assert args.sglang_router_ip is None or args.sglang_router_port is not None


def _check_engine(plan: EnginePlan, commands: list[list[str]]) -> None:
    """The nodes of an engine together start every rank of it once."""
    assert len(commands) == plan.nodes
    started: Counter[tuple[int, int]] = Counter()
    for node_rank, words in enumerate(commands):
        assert "hush" not in " ".join(words)
        server = _sglang_parser().parse_args(words)
        _check_server(server)
        started.update(_ranks_of_node(server.nnodes, server.pp_size, server.tp_size, node_rank))
    assert started == {(p, t): 1 for p in range(server.pp_size) for t in range(server.tp_size)}
    assert len(started) == plan.num_gpus


@cache
def _sglang_parser() -> argparse.ArgumentParser:
    """SGLang's argument list under its own names, with its defaults."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    defaults = {}
    for record in catalog.records(catalog.SGLANG):
        flag = flag_of_record(record, prefix="", source="sglang", group="")
        add_to_parser(parser, flag)
        defaults[flag.dest] = flag.default
    parser.set_defaults(**defaults)
    for action in parser._actions:
        if action.dest in defaults:
            action.default = defaults[action.dest]
    return parser


def _check_server(server: argparse.Namespace) -> None:
    """Repeat SGLang's assertions about its sizes (0.5.20: arg_groups/parallel_hook.py and validation_hook.py)."""
    assert min(server.tp_size, server.pp_size, server.dp_size, server.ep_size, server.moe_dp_size) >= 1
    assert server.tp_size * server.pp_size % server.nnodes == 0
    assert server.dp_size == 1 or server.enable_dp_attention
    assert server.tp_size % server.dp_size == 0
    assert server.moe_dense_tp_size in (None, 1, server.tp_size)
    assert server.tp_size % (server.ep_size * server.moe_dp_size) == 0
    if server.moe_dp_size > 1:
        assert server.pp_size == 1
        assert server.ep_size in (1, server.tp_size // server.moe_dp_size)
    if server.disaggregation_mode == "decode":
        assert not server.enable_hierarchical_cache


def _ranks_of_node(nnodes: int, pp: int, tp: int, node_rank: int) -> list[tuple[int, int]]:
    """(pipeline rank, tensor rank) of the processes that SGLang starts on one node: whole stages, or part of one."""
    stages_per_node, nodes_per_stage = max(pp // nnodes, 1), max(nnodes // pp, 1)
    tp_per_node = tp // nodes_per_stage
    first_stage = stages_per_node * (node_rank // nodes_per_stage)
    first_rank = tp_per_node * (node_rank % nodes_per_stage)
    return [(first_stage + p, first_rank + t) for p in range(stages_per_node) for t in range(tp_per_node)]


# The property


def _run(folder: Path, max_examples: int, *, derandomize: bool) -> Counter[str]:
    """Check random command lines and the counterexamples of earlier versions; return how many were accepted."""
    seen: Counter[str] = Counter()

    def accepted_lines_can_be_built(line: str, seed: int) -> None:
        args = _parse(line, folder)
        seen["refused" if args is None else "accepted"] += 1
        if args is not None:
            check(args, seed)

    test = given(line=command_lines(), seed=st.integers(0, 2**32))(accepted_lines_can_be_built)
    for line, seed in COUNTEREXAMPLES:
        test = example(SMALL + line, seed)(test)
    settings(
        max_examples=max_examples, deadline=None, derandomize=derandomize, database=None, print_blob=not derandomize,
        suppress_health_check=list(HealthCheck),
    )(test)()  # fmt: skip
    rate = seen["accepted"] / seen.total()
    print(f"{seen.total()} command lines, {rate:.0%} accepted")
    assert 0.2 <= rate <= 0.6
    return seen


def test_accepted_command_lines_can_be_built(tmp_path):
    _run(tmp_path, 300, derandomize=True)


@pytest.mark.soak
def test_ten_thousand_command_lines(tmp_path):
    assert _run(tmp_path, 10_000, derandomize=False).total() >= 10_000
