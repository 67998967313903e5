"""Random command lines over the flags that decide sizes: parallelism, batches, placement, engines (for hypothesis).

Numbers are small and mostly chosen so that they fit each other; each has a small chance not to. That way a good part is
accepted and a good part refused.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
NOWHERE = "/nowhere/some-model"


def _often(draw: st.DrawFn, likely: T, *others: T) -> T:
    """``likely`` in 19 of 20 draws, else one of the others."""
    return draw(st.sampled_from(others)) if draw(st.integers(0, 19)) == 19 else likely


def _rarely(draw: st.DrawFn, *words: Any, one_in: int = 4) -> list[str]:
    """The words, or nothing."""
    return [str(word) for word in words] if draw(st.integers(1, one_in)) == one_in else []


def _divisor(draw: st.DrawFn, number: int, largest: int = 16) -> int:
    return draw(st.sampled_from([d for d in range(1, largest + 1) if number % d == 0]))


@st.composite
def command_lines(draw: st.DrawFn, *, moe: bool = True) -> str:
    """A whole command line with ``--dry-run`` for a checkpoint that is not there. ``moe``: also mixtures of experts."""
    sizes = {
        "tp": draw(st.sampled_from([1, 1, 2, 4])),
        "pp": draw(st.sampled_from([1, 1, 2, 3, 4])),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "dp": draw(st.sampled_from([1, 2, 3, 4])),
    }
    sizes["vpp"] = draw(st.sampled_from([1, 1, 2, 3])) if sizes["pp"] > 1 else 1
    words = ["--dry-run", "--hf-checkpoint", NOWHERE, "--prompt-data", "prompts.jsonl", "--num-rollout", "3"]
    words += ["--rollout-max-response-len", "32"]
    words += _trainer(draw, sizes)
    words += _model(draw, sizes["tp"])
    words += _pipeline(draw, sizes["pp"], sizes["vpp"])
    if moe and draw(st.integers(0, 4)) == 4:
        words += _experts(draw, sizes)
    else:
        words += _rarely(draw, "--expert-tensor-parallel-size", draw(st.sampled_from([1, 2, 3])), one_in=20)
    words += _batch(draw, sizes)
    words += _engines(draw, sizes)
    words += _loop(draw)
    return shlex.join(words)


def _trainer(draw: st.DrawFn, sizes: dict[str, int]) -> list[str]:
    world = sizes["tp"] * sizes["pp"] * sizes["cp"] * sizes["dp"]
    nodes = _divisor(draw, world, 4)
    words = [
        "--actor-num-nodes", _often(draw, nodes, 0, 1, 3),
        "--actor-num-gpus-per-node", _often(draw, world // nodes, 0, 1, 5, 8),
        "--tensor-model-parallel-size", _often(draw, sizes["tp"], 3, 8),
        "--pipeline-model-parallel-size", sizes["pp"],
        "--context-parallel-size", _often(draw, sizes["cp"], 3, 4),
    ]  # fmt: skip
    instances = _rarely(draw, "--num-distributed-optimizer-instances", draw(st.sampled_from([1, 2, 3])), one_in=10)
    return [
        *map(str, words),
        *_rarely(draw, "--sequence-parallel"),
        *_rarely(draw, "--use-tp-pp-dp-mapping"),
        *instances,
    ]


def _model(draw: st.DrawFn, tp: int) -> list[str]:
    heads = _often(draw, tp * draw(st.integers(1, 3)), 1, 6, 7)
    words = ["--num-attention-heads", heads, "--hidden-size", _often(draw, heads * 16, 48, 100)]
    words += ["--vocab-size", draw(st.integers(50, 200)), "--swiglu", "--disable-bias-linear"]
    if draw(st.booleans()):
        groups = _often(draw, _divisor(draw, heads), 3, 5)
        words += ["--group-query-attention", "--num-query-groups", groups]
    words += _rarely(draw, "--kv-channels", draw(st.integers(1, 16)))
    words += _rarely(draw, "--padded-vocab-size", draw(st.sampled_from([200, 201, 256])), one_in=12)
    words += _rarely(draw, "--normalization", "RMSNorm")
    return list(map(str, words))


def _pipeline(draw: st.DrawFn, pp: int, vpp: int) -> list[str]:
    """Layers, the stages they are divided into, and what is kept of them."""
    per_stage = vpp * draw(st.integers(1, 2))
    layers, words = per_stage * pp, []
    if pp > 1 and draw(st.integers(0, 2)) == 0:
        for end in draw(st.sampled_from([["first"], ["last"], ["first", "last"]])):
            kept = vpp * draw(st.integers(1, 3))
            layers += kept - per_stage
            words += [f"--decoder-{end}-pipeline-num-layers", _often(draw, kept, 0, 1, 5)]
    elif pp > 1 and draw(st.integers(0, 3)) == 0:
        for end in draw(st.sampled_from([["embedding"], ["loss"], ["embedding", "loss"]])):
            words.append(f"--account-for-{end}-in-pipeline-split")
            layers -= 1
    words += ["--num-layers", _often(draw, max(layers, 1), 1, 2, 7)]
    if vpp > 1:
        by_layers = ["--num-layers-per-virtual-pipeline-stage", _often(draw, per_stage // vpp, 1, 2, 3)]
        by_stages = ["--num-virtual-stages-per-pipeline-rank", _often(draw, vpp, 1, 4)]
        words += draw(st.sampled_from([by_layers, by_stages]))
        words += _rarely(
            draw, "--microbatch-group-size-per-virtual-pipeline-stage", _often(draw, pp, 1, pp + 1), one_in=6
        )
    elif draw(st.integers(0, 30)) == 30:
        words += ["--num-virtual-stages-per-pipeline-rank", 2]
    words += _rarely(draw, "--no-overlap-p2p-communication", one_in=8)
    words += draw(
        st.sampled_from(
            [[], [], [], [], ["--recompute-activations"], ["--recompute-granularity", "selective"],
             ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1],
             ["--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", 2],
             ["--recompute-granularity", "selective", "--recompute-num-layers", 1]]
        )
    )  # fmt: skip
    return list(map(str, words))


def _experts(draw: st.DrawFn, sizes: dict[str, int]) -> list[str]:
    shared = sizes["tp"] * sizes["cp"] * sizes["dp"]  # slots of one pipeline stage
    ep = _often(draw, _divisor(draw, shared), 3, 5)
    experts = _often(draw, ep * draw(st.integers(1, 3)), 0, 1, 7)
    words = ["--num-experts", experts, "--expert-model-parallel-size", ep, "--moe-ffn-hidden-size", 32]
    words += ["--moe-router-topk", _often(draw, min(2, max(experts, 1)), 1, 4)]
    if shared % ep == 0 and draw(st.booleans()):
        words += ["--expert-tensor-parallel-size", _often(draw, _divisor(draw, shared // ep), 3)]
    words += _rarely(draw, "--moe-grouped-gemm")
    words += _rarely(draw, "--moe-router-pre-softmax", one_in=2)
    return list(map(str, words))


def _batch(draw: st.DrawFn, sizes: dict[str, int]) -> list[str]:
    micro = draw(st.integers(1, 3))
    group = sizes["pp"] if sizes["vpp"] > 1 else 1
    dynamic = draw(st.booleans())
    unit = 1 if dynamic and draw(st.booleans()) else sizes["dp"] * group * micro
    size = max(unit * draw(st.integers(1, 3)), 1 if draw(st.integers(0, 9)) == 9 else sizes["dp"] * group)
    steps = draw(st.integers(1, 3))
    n = _divisor(draw, size * steps, 8)
    words = ["--rollout-batch-size", _often(draw, size * steps // n, 1, 5, 7), "--n-samples-per-prompt", n]
    way = draw(st.sampled_from(["size", "size", "steps", "both"]))
    words += ["--global-batch-size", _often(draw, size, 1, 3, 5, 8)] if way != "steps" else []
    words += ["--num-steps-per-rollout", _often(draw, steps, 1, 2, 4)] if way != "size" else []
    words += ["--micro-batch-size", _often(draw, micro, 1, 2, 4)] if micro > 1 or draw(st.booleans()) else []
    if dynamic:
        words += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", draw(st.sampled_from([1, 40, 100, 1000]))]
        words += _rarely(draw, "--custom-generate-function-path", "my.plugin.generate")
    words += _rarely(draw, "--balance-data", one_in=3)
    words += _rarely(draw, "--balance-by-flops", one_in=3 if dynamic else 40)
    return list(map(str, words))


def _engines(draw: st.DrawFn, sizes: dict[str, int]) -> list[str]:
    per_node = draw(st.sampled_from([1, 2, 4, 8, 8]))
    spans = draw(st.integers(0, 5)) == 0
    slots = per_node * draw(st.integers(1, 3)) if spans else _divisor(draw, per_node)
    slots = _often(draw, slots, 3, 6)
    engines = draw(st.integers(1, 4))
    words = ["--num-gpus-per-node", per_node, "--rollout-num-gpus-per-engine", slots]
    words += ["--rollout-num-gpus", _often(draw, slots * engines, 0, 1, 5)] if draw(st.integers(0, 7)) else []
    stages = _divisor(draw, slots, 4)
    words += ["--sglang-pp-size", _often(draw, stages, 3)] if draw(st.booleans()) else []
    tp = slots // stages
    if draw(st.integers(0, 3)) == 0:
        words += ["--sglang-dp-size", _often(draw, _divisor(draw, max(tp, 1)), 0, 3)]
        words += ["--sglang-enable-dp-attention"] if draw(st.integers(0, 5)) else []
    words += _rarely(draw, "--sglang-ep-size", _often(draw, _divisor(draw, max(tp, 1)), 0, 3, 16), one_in=5)
    words += _rarely(draw, "--sglang-moe-dp-size", _often(draw, 1, 2, 3), one_in=12)
    words += _rarely(draw, "--sglang-moe-dense-tp-size", _often(draw, 1, 2, 3), one_in=12)
    words += _rarely(draw, "--sglang-enable-hierarchical-cache", one_in=8)
    words += _rarely(draw, "--sglang-api-key", "hush", one_in=8)
    words += _rarely(draw, "--prefill-num-servers", draw(st.integers(1, 4)), one_in=8)
    if draw(st.integers(0, 5)) == 5:
        words += _deployment(draw, slots)
    words += _rarely(draw, "--rollout-external-engine-addrs", "10.0.0.1:30000", one_in=40)
    words += _rarely(draw, "--router-policy", draw(st.sampled_from(["round_robin", "consistent_hashing"])))
    words += _rarely(draw, "--sglang-router-ip", draw(st.sampled_from(["10.0.0.1", "::1"])), one_in=20)
    words += _rarely(draw, "--sglang-router-port", 8000, one_in=6)
    return list(map(str, words))


def _deployment(draw: st.DrawFn, default: int) -> list[Any]:
    """``--sglang-config`` with the file's contents in place of its name (see ``with_files``), and slots for it."""
    models, total = [], 0
    for name in draw(st.sampled_from([["actor"], ["actor"], ["actor", "judge"]])):
        groups = []
        for kind in draw(
            st.sampled_from([["regular"], ["regular", "placeholder"], ["prefill", "decode"], ["prefill"]])
        ):
            size = _often(draw, draw(st.sampled_from([default, 1, 2, 4])), 3)
            group: dict[str, Any] = {"worker_type": kind, "num_gpus": _often(draw, size * draw(st.integers(1, 2)), 5)}
            if size != default or draw(st.booleans()):
                group["num_gpus_per_engine"] = size
            options = [
                {},
                {"mem_fraction_static": 0.5},
                {"pp_size": 1},
                {"pp_size": 2},
                {"ep_size": size},
                {"tp_size": 4},
            ]
            group["overrides"] = draw(st.sampled_from(options))
            total += group["num_gpus"]
            groups.append(group)
        frozen = {} if name == "actor" else {"update_weights": False}
        models.append({"name": name, "server_groups": groups, **frozen})
    return ["--sglang-config", json.dumps({"sglang": models}), "--rollout-num-gpus", _often(draw, total, total + 1)]


def with_files(words: Sequence[str], folder: Path) -> list[str]:
    """Write contents that stand in place of a file's name to ``folder`` and put the names in."""
    found = []
    for word in words:
        if word.startswith("{"):
            path = folder / f"{hashlib.sha256(word.encode()).hexdigest()[:16]}.yaml"
            path.write_text(word)
            word = str(path)
        found.append(word)
    return found


def _loop(draw: st.DrawFn) -> list[str]:
    """Draw the half of the loop that runs, and whether trainer and engines share slots."""
    words = _rarely(draw, "--colocate", one_in=3)
    words += draw(st.sampled_from([[]] * 8 + [["--debug-rollout-only"], ["--debug-train-only"]]))
    words += _rarely(draw, "--load-debug-rollout-data", "dumps/{rollout_id}.pt", one_in=20)
    words += draw(
        st.sampled_from(
            [[]] * 9 + [["--offload"], ["--offload-train"], ["--no-offload-train"], ["--no-offload-rollout"]]
        )
    )
    words += _rarely(draw, "--advantage-estimator", draw(st.sampled_from(["ppo", "gspo"])), one_in=6)
    words += _rarely(draw, "--use-rollout-routing-replay", one_in=20)
    words += draw(st.sampled_from([[]] * 6 + [["--fp16"], ["--bf16"], ["--fp32"]]))
    return words
