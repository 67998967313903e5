"""The estimate of memory as the table of ``--dry-run``, and on which GPUs a run fits."""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Mapping, Sequence

from slime.arguments.args import Args
from slime.arguments.rules.checkpoints import needs_reference
from slime.preflight.plan.memory import GIB, EnginesMemory, Memory, capacities, memory
from slime.preflight.plan.memory_trainer import (
    TrainerMemory,
    element_size,
    gradient_size,
    memory_by_part,
    overwrites_logits,
    state_bytes,
)
from slime.preflight.plan.model_size import ModelSize

WIDTH = 98  # and two for the indent
SMI_DEADLINE_S = 30.0
TIGHT = 0.9  # beyond this part of a GPU, fragmentation decides


def memory_text(args: Args) -> str:
    """Return the table, indented by two columns, at most 100 columns wide, or a sentence without a model."""
    try:
        found = memory(args)
    except ValueError as error:
        return f"  No estimate: {error}."
    lines = ["Per GPU, in GiB, on CUDA GPUs; what is counted and what is not: docs/en/advanced/memory.md"]
    parts = ", ".join(
        f"{name} {_billions(count)}" for name, count in found.size.parts.items() if count and name != "norms"
    )
    active = f", {_billions(found.size.active)} per token" if found.size.shape.experts else ""
    model = f"model      {_billions(found.size.total)} parameters{active}: {parts}"
    lines += textwrap.wrap(model, WIDTH, subsequent_indent=" " * 11)  # a no-break space sticks
    if found.trainer is not None:
        lines += _trainer_lines(args, found.size, found.trainer)
    for group in found.engines:
        lines += _engine_lines(group)
    if found.colocate and found.trainer is not None:
        lines += [_colocated_line(found)]
    lines += ["", *_verdict_lines(found, capacities(args.gpu_memory_gb))]
    for remark in found.remarks:
        lines += textwrap.wrap(f"note: {remark}", WIDTH, subsequent_indent="      ")
    return "\n".join(f"  {line}".rstrip() for line in lines).replace("\xa0", " ")


def _trainer_lines(args: Args, size: ModelSize, trainer: TrainerMemory) -> list[str]:
    parallel, rank = size.parallel, size.ranks[trainer.stage]
    sizes = f"tensor {parallel.tp}, pipeline {parallel.pp}, context {parallel.cp}, data {parallel.dp}"
    if size.shape.experts:
        sizes += f", expert {parallel.ep} x {parallel.etp}"
    stage = f"; stage {trainer.stage + 1} needs most" if parallel.pp > 1 else ""
    shared = f"shared by {parallel.dense_ranks} ranks" if parallel.dense_ranks > 1 else "not shared"
    if rank.expert:
        shared += f", of experts by {parallel.expert_ranks}" if parallel.expert_ranks > 1 else ", of experts not"
    if not trainer.optimizer:
        shared = "in the host's memory"
    width = {2: "fp16" if args.fp16 else "bf16", 4: "fp32"}[element_size(args)]
    logits_in = width if overwrites_logits(args) else "fp32"
    recompute = args.recompute_granularity or "no"
    of_adapters = " of the adapters" if args.lora_rank else ""
    held = f", {trainer.in_flight:g} micro-batches" if trainer.in_flight > 1 else ""
    explained = {
        "parameters": f"{_billions(rank.total + rank.tower)} in {width}" + (" and adapters" if args.lora_rank else ""),
        "gradients": ("fp32" if gradient_size(args) == 4 else width) + of_adapters,
        "optimizer": f"{state_bytes(args):g} bytes per parameter{of_adapters}, {shared}",
        "activations": f"{trainer.tokens:,} tokens{held}, {recompute} recomputation",
        "logits": f"{trainer.tokens:,} x {size.shape.vocab // parallel.tp:,} in {logits_in}, with their gradient",
        "one layer's backward": "gradients of activations" + (", recomputed ones" if recompute == "full" else ""),
        "CUDA and NCCL": "a constant: context, kernels, communication buffers",
    }
    lines = [f"trainer    {sizes}{stage}"]
    rows = {name: count for name, count in memory_by_part(trainer).items() if count or args.num_rollout != 0}
    lines += [_row(name, count, explained[name]) for name, count in rows.items()]
    what = "peak of a step" if trainer.step == trainer.total else "peak while weights are sent"
    lines.append(_row("total", trainer.total, what))
    if trainer.host:
        lines.append(_row("in host memory", trainer.host, _host_copies(args, trainer)))
    return lines


def _host_copies(args: Args, trainer: TrainerMemory) -> str:
    """Say what of this GPU is kept in the host's memory."""
    what = []
    if trainer.offloaded:
        what.append("the offloaded trainer")
    if needs_reference(args) and not args.lora_rank:
        what.append("actor and reference")
    if args.optimizer_cpu_offload:
        what.append("optimizer state")
    return "on top: " + ", ".join(what)


def _engine_lines(group: EnginesMemory) -> list[str]:
    engine = group.engine
    sizes = f"tensor {engine.sizes.tp}" + (f", pipeline {engine.sizes.pp}" if engine.sizes.pp > 1 else "")
    sizes += f", data-parallel attention {engine.sizes.dp}" if engine.sizes.dp > 1 else ""
    gpus = "1 GPU" if engine.sizes.gpus == 1 else f"{engine.sizes.gpus} GPUs"
    label = f"{group.label}, " if group.label else ""
    lines = [f"engine     {label}{gpus}: {sizes}", _row("weights", engine.weights, engine.format.name)]
    per_token = f"{engine.kv_per_token / 1024:,.1f} KiB per token"
    state = f", {engine.state_per_request / 2**20:,.1f} MiB of state" if engine.state_per_request else ""
    if engine.request_tokens:
        cache = engine.request_tokens * engine.kv_per_token + engine.state_per_request
        lines.append(_row("one request", cache, f"{engine.request_tokens:,} tokens, {per_token}{state}"))
    else:
        lines.append(_row("one request", engine.state_per_request, per_token + state))
    return lines


def _colocated_line(found: Memory) -> str:
    offloaded = {"trainer": found.offload_train, "engine": found.offload_rollout}
    resident = [name for name, is_offloaded in offloaded.items() if not is_offloaded]
    if resident:
        return f"colocated  both on every GPU; what is not offloaded stays there: {', '.join(resident)}"
    return "colocated  they take turns; the offloaded one keeps its CUDA and NCCL buffers"


def misfit(found: Memory, gigabytes: float, capacity: int) -> str | None:
    """Return what does not fit on GPUs of ``capacity`` bytes (``gigabytes`` as sold), by how much, else None."""
    problems = []
    if (used := found.training(capacity)) > capacity:
        problems.append(f"training {_training(used, capacity)}")
    for group in found.engines:
        if not found.generating_fits(group, capacity):
            problems.append(f"{group.label or 'an engine'} {_generating(found, group, capacity)}")
    return f"on GPUs of {gigabytes:g} GB {'; '.join(problems)} GiB" if problems else None


def fit_sentence(args: Args, found: Memory) -> tuple[bool, str]:
    """Return whether the run fits on the GPUs of ``--gpu-memory-gb``, else on any GPU of the table, and a sentence."""
    sizes = capacities(args.gpu_memory_gb)
    problems = {gigabytes: misfit(found, gigabytes, capacity) for gigabytes, capacity in sizes.items()}
    enough = [gigabytes for gigabytes, problem in problems.items() if problem is None]
    if enough and args.gpu_memory_gb is not None:
        return True, f"It fits on GPUs of {enough[0]:g} GB, by the estimate above."
    if enough:
        return True, f"It fits on GPUs from {enough[0]:g} GB, by the estimate above."
    which = "" if args.gpu_memory_gb is not None else "on every GPU of the table above, "
    return False, (
        f"A real run would run out of memory, by the estimate above: {which}{list(problems.values())[-1]}. More slots, "
        "another division of the model, recomputation or offloading need less: docs/en/advanced/memory.md"
    )


def warning_of_this_machine(args: Args) -> str | None:
    """Return what does not fit on the GPUs of this machine, or of ``--gpu-memory-gb``, before a run fills them.

    None where everything fits, without an estimate, where nvidia-smi is not there to say what a GPU has, and where the
    GPUs are those of a cluster that the run joins.
    """
    joins = args.ray_address or os.environ.get("RAY_ADDRESS")
    smi = None if joins else shutil.which("nvidia-smi")
    if smi is None and args.gpu_memory_gb is None:
        return None
    try:
        found = memory(args)
        if args.gpu_memory_gb is not None:
            [(gigabytes, capacity)] = capacities(args.gpu_memory_gb).items()
        else:
            asked = [str(smi), "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
            if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
                asked.append(f"--id={visible}")
            said = subprocess.run(asked, capture_output=True, text=True, timeout=SMI_DEADLINE_S, check=True).stdout
            capacity = min(int(line) for line in said.split()) * 2**20
            gigabytes = round(capacity / GIB, 1)
    except (ValueError, OSError, subprocess.SubprocessError):
        return None
    problem = misfit(found, gigabytes, capacity)
    return f"by the estimate of --dry-run the run does not fit: {problem}" if problem else None


def _verdict_lines(found: Memory, sizes: Mapping[float, int]) -> list[str]:
    """A table of GPUs; one more for every group of engines after the first."""
    lines: list[str] = []
    groups: Sequence[EnginesMemory | None] = found.engines or (None,)
    for number, group in enumerate(groups):
        head, training = ["GPU"], found.trainer is not None and number == 0
        head += ["training"] if training else []
        head += [f"generating ({group.label or 'per engine'})"] if group is not None else []
        rows = []
        for gigabytes, capacity in sizes.items():
            row = [f"{gigabytes:g} GB"]
            row += [_training(found.training(capacity), capacity)] if training else []
            row += [_generating(found, group, capacity)] if group is not None else []
            rows.append(row)
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        lines += [""] if lines else []
        lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in [head, *rows]]
    return lines


def _training(used: float, capacity: int) -> str:
    if used > capacity:
        return f"does not fit: {(used - capacity) / GIB:,.1f} over"
    if used > TIGHT * capacity:
        return f"tight: {(capacity - used) / GIB:,.1f} free"
    return f"fits: {(capacity - used) / GIB:,.1f} free"


def _generating(found: Memory, group: EnginesMemory, capacity: int) -> str:
    engine = group.engine
    cache = engine.cache_bytes(capacity)
    if cache <= 0:
        return f"does not fit: weights {-cache / GIB:,.1f} over"
    requests = engine.requests(capacity)
    if not engine.fits(capacity):
        return f"does not fit: {cache / GIB:,.1f} of cache hold no request"
    if not found.generating_fits(group, capacity):
        return "does not fit beside the trainer"
    room = f"{cache / GIB:,.1f} of cache: {engine.tokens(capacity):,} tokens"
    return room if requests is None else f"{room}, {requests:,} of these requests"


def _row(name: str, count: float, explained: str) -> str:
    return f"  {name:<21}{count / GIB:>7.1f}  {explained}"


def _billions(count: int) -> str:
    return f"{count / 1e9:,.2f}\xa0B" if count >= 5e6 else f"{count / 1e6:,.2f}\xa0M"
