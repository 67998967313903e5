"""Adapters as PEFT writes and reads them: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from slime.arguments.args import Args
from slime.backends.megatron_utils.lora.adapter import Adapter, adapters_of
from slime.backends.megatron_utils.lora.experts import ExpertAdapter
from slime.backends.megatron_utils.state.parallel import expert_parallel, first_error, gather_from_world, unwrap
from slime.backends.megatron_utils.weights.iterate import iter_hf_weights
from slime.backends.megatron_utils.weights.layouts import ColumnParallel, Layout, Replicated, RowParallel
from slime.backends.megatron_utils.weights.maps import Family, Rule
from slime.backends.megatron_utils.weights.merging import ADAPTER
from slime.backends.megatron_utils.weights.naming import Weight, model_dims, model_family
from slime.utils.atomic_file import sync

PREFIX = "base_model.model."
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# What other adapters may have and these do not: setting -> the value that means "not used".
_UNUSED: dict[str, Any] = {
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "bias": "none",
    "modules_to_save": None,
    "fan_in_fan_out": False,
}


def adapter_weights_of(model_chunks: Sequence[torch.nn.Module], args: Args, family: Family) -> list[Weight]:
    """Return this rank's parameters of adapters as weights with PEFT's names; those of experts one by one."""
    del args, family  # adapters know their rules
    weights: list[Weight] = []
    for chunk in model_chunks:
        for _, _, adapter in adapters_of(chunk):
            for hf, name in zip(adapter.rule.hf, adapter.rows, strict=True):
                if name in adapter.targets:
                    weights += _weights(adapter, name, hf)
    return weights


def _weights(adapter: Adapter, name: str, hf: str) -> Iterator[Weight]:
    for part in ("lora_A", "lora_B"):
        parameter = getattr(adapter.projection(name), part)
        names = (f"{PREFIX}{hf.removesuffix('.weight')}.{part}.weight",)
        rule = Rule((f"{adapter.rule.megatron[0]}.{ADAPTER}.{name}.{part}",), names, _layout(adapter, part))
        numbers: Sequence[int | None] = [None]
        if isinstance(adapter, ExpertAdapter):
            first = expert_parallel().rank * len(parameter)
            numbers = range(first, first + len(parameter))
        for i, expert in enumerate(numbers):
            full_names = tuple(rule.hf_names(adapter.layer, expert))
            own = parameter if expert is None else parameter.detach()[i]
            yield Weight(full_names[0], own, rule, adapter.layer, expert, full_names)


def _layout(adapter: Adapter, part: str) -> Layout:
    if part == "lora_A":
        return RowParallel() if adapter.kind == "row" else Replicated()
    if adapter.kind != "column":
        return Replicated()
    return adapter.rule.layout if len(adapter.rule.hf) == 1 else ColumnParallel()


def iter_adapters(model: Sequence[torch.nn.Module], args: Args) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(PEFT name, full tensor)`` of all pipeline stages, on every rank; collective over all ranks."""
    return iter_hf_weights(model, args, gather_pp=True, select=adapter_weights_of)


def target_names(model: Sequence[torch.nn.Module]) -> list[str]:
    """Return the projections that have adapters, on any rank, sorted (collective)."""
    own = {name for chunk in model for _, _, adapter in adapters_of(chunk) for name in adapter.targets}
    return sorted({name for names in gather_from_world(own) for name in names})


def peft_config(args: Args, targets: Sequence[str]) -> dict[str, Any]:
    """Return what ``adapter_config.json`` says."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(args.hf_checkpoint),
        "r": args.lora_rank,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": args.lora_dropout,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }


def write_adapter(model: Sequence[torch.nn.Module], args: Args, directory: str | Path) -> None:
    """Write the adapters to the new ``directory``; collective. Raises RuntimeError on all ranks if rank 0 cannot."""
    from safetensors.torch import save_file

    directory, targets = Path(directory), target_names(model)
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in iter_adapters(model, args)}
    error = None
    if dist.get_rank() == 0:
        try:
            directory.mkdir(parents=True)
            save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
            (directory / CONFIG).write_text(json.dumps(peft_config(args, targets), indent=2) + "\n")
            for path in directory.iterdir():
                sync(path)
        except OSError as e:
            error = f"could not write the adapter to {directory}: {e}"
    if message := first_error(error):
        raise RuntimeError(message)


@torch.no_grad()
def load_adapter(model: Sequence[torch.nn.Module], args: Args, directory: str | Path) -> None:
    """Copy the adapter in ``directory`` (PEFT's form) into the model's; each rank reads its own part.

    Raises ValueError unless rank, alpha, targets, names and shapes are those of the flags.
    """
    from safetensors import safe_open

    directory = Path(directory)
    for part in (WEIGHTS, CONFIG):
        if not (directory / part).is_file():
            raise ValueError(f"--lora-adapter-path {directory} has no {part}; expected an adapter that PEFT has saved")
    _check_config(args, directory, target_names(model))
    weights = adapter_weights_of(model, args, model_family(args))
    dims = model_dims(args, unwrap(model[0]).config)
    with safe_open(directory / WEIGHTS, framework="pt") as file:
        there = set(file.keys())
        wanted = {name for names in gather_from_world([w.name for w in weights]) for name in names}
        if there != wanted:
            raise ValueError(
                f"--lora-adapter-path {directory} does not fit the model: it lacks {sorted(wanted - there)[:4]}, and "
                f"has {sorted(there - wanted)[:4]} too many"
            )
        for weight in weights:
            source, ranks = file.get_slice(weight.name), weight.tensor_ranks
            shape = tuple(weight.hf_shapes(dims)[0])
            if tuple(source.get_shape()) != shape:
                raise ValueError(
                    f"--lora-adapter-path {directory}: {weight.name} is {list(source.get_shape())}, expected "
                    f"{list(shape)}"
                )
            weight.parameter.copy_(weight.rule.layout.shard([source], ranks.rank, ranks.size, dims))


def _check_config(args: Args, directory: Path, targets: list[str]) -> None:
    config = json.loads((directory / CONFIG).read_text())
    wrong = [f"{key} {config[key]!r}" for key, unused in _UNUSED.items() if config.get(key, unused) not in (unused, [])]
    if wrong:
        raise ValueError(f"--lora-adapter-path {directory} has {', '.join(wrong)}, which adapters here do not have")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if rank != args.lora_rank:
        raise ValueError(f"--lora-adapter-path {directory} has r {rank}, and --lora-rank is {args.lora_rank}")
    if alpha != args.lora_alpha:
        what = f"--lora-adapter-path {directory} has lora_alpha {alpha}"
        raise ValueError(f"{what}, and --lora-alpha is {args.lora_alpha}")
    modules = config.get("target_modules")
    if isinstance(modules, list) and sorted(modules) != targets:
        raise ValueError(
            f"--lora-adapter-path {directory} adapts {' '.join(sorted(modules))}, and --lora-target-modules are "
            f"{' '.join(targets)}"
        )
