"""Add adapters to the chosen linear layers and freeze everything else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.lora.adapter import Adapter, Form, Kind, LinearAdapter
from slime.backends.megatron_utils.lora.experts import ExpertAdapter
from slime.backends.megatron_utils.state.parallel import (
    expert_tensor_parallel,
    gather_from_world,
    tensor_parallel,
)
from slime.backends.megatron_utils.weights.layouts import Dims, QueryKeyValue, Replicated, RowParallel, Vocabulary
from slime.backends.megatron_utils.weights.maps import Family, Rule
from slime.backends.megatron_utils.weights.merging import ADAPTER
from slime.backends.megatron_utils.weights.naming import (
    MTP,
    global_named_parameters,
    is_value_head,
    model_dims,
    model_family,
)

if TYPE_CHECKING:
    from slime.backends.megatron_utils.lora.adapter import Parts

ALL_LINEAR = "all-linear"
_DOWN_PROJECTIONS = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")


@dataclass(frozen=True)
class Site:
    """A linear layer that adapters fit; ``experts``: of how many local routed experts it is, 0 for another layer."""

    linear: torch.nn.Module
    weight: torch.Tensor
    rule: Rule
    layer: int | None
    kind: Kind
    experts: int

    @property
    def projections(self) -> list[str]:
        """Return the last part of the names of its Hugging Face projections: ``q_proj``, ``k_proj``, ``v_proj``."""
        return [projection_name(name) for name in self.rule.hf]


def projection_name(hf_name: str) -> str:
    """Return ``q_proj`` of ``model.layers.0.self_attn.q_proj.weight``."""
    return hf_name.removesuffix(".weight").rpartition(".")[2]


def add_adapters(args: Args, models: Sequence[torch.nn.Module]) -> None:
    """Freeze the model and put adapters on what ``--lora-target-modules`` names; a critic's value head is trained.

    Before the chunks are wrapped for data parallelism, and before the optimizer. Does nothing without ``--lora-rank``.
    Raises ValueError for targets that exist on no rank, naming those that do, and for layouts that cut within a
    projection's heads.
    """
    if not args.lora_rank:
        return
    sites = list(_sites(models, model_family(args)))
    targets = _targets(args, sites)
    for model in models:
        for parameter in model.parameters():
            parameter.requires_grad_(is_value_head(parameter))
        if (embedding := getattr(model, "embedding", None)) is not None:
            embedding.register_forward_hook(_requiring_grad)
    found = [_add(args, models, site, targets) for site in sites]
    if not any(found):
        raise ValueError(
            f"--lora-target-modules {' '.join(sorted(targets))}: a pipeline stage has no layer with any of them, and "
            "would train nothing; name more, or use fewer stages"
        )


def _requiring_grad(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    """Recomputed layers have gradients only if their input asks for one, which that of a frozen embedding does not."""
    del module, inputs
    return output.requires_grad_() if torch.is_grad_enabled() and not output.requires_grad else output


def _sites(models: Sequence[torch.nn.Module], family: Family) -> Iterator[Site]:
    owners = {id(p): m for model in models for m in model.modules() for p in m.parameters(recurse=False)}
    seen = set()
    for name, weight in global_named_parameters(models):
        if name.startswith(MTP) or weight.dim() != 2 or not family.knows(name):
            continue
        rule, place = family.find(name)
        kind, linear = _kind(name, rule), owners[id(weight)]
        if kind is None or linear in seen:
            continue
        seen.add(linear)  # a grouped layer has a weight per expert
        experts = sum(1 for _ in linear.parameters(recurse=False)) if rule.is_expert else 0
        yield Site(linear, weight, rule, place.layer, kind, experts)


def _kind(name: str, rule: Rule) -> Kind | None:
    """Return how tensor parallelism cuts a linear layer; None for what is none.

    And for experts whose Hugging Face tensors are stacked, for which adapters have no names: and for a module each.
    And for gated delta nets: engines take no adapters of them.
    """
    if isinstance(rule.layout, Vocabulary) or rule.is_stacked or ".local_experts." in name or ".linear_attn." in name:
        return None
    if isinstance(rule.layout, RowParallel):
        return "row"
    if isinstance(rule.layout, Replicated):
        return "replicated" if name.endswith(_DOWN_PROJECTIONS) else None
    return "column"


def _targets(args: Args, sites: Sequence[Site]) -> set[str]:
    exist = {name for names in gather_from_world([n for s in sites for n in s.projections]) for name in names}
    wanted = set(args.lora_target_modules)
    if wanted == {ALL_LINEAR}:
        return exist
    if unknown := sorted(wanted - exist):
        raise ValueError(
            f"--lora-target-modules {' '.join(unknown)} match no linear layer of the model; there are "
            f"{', '.join(sorted(exist))}, and {ALL_LINEAR} for all of them"
        )
    return wanted


def _add(args: Args, models: Sequence[torch.nn.Module], site: Site, targets: set[str]) -> bool:
    """Put the adapters of one layer in place; return whether there are any."""
    wanted = [name for name in site.projections if name in targets]
    if not wanted:
        return False
    config: Any = models[0].config
    dims, ranks = model_dims(args, config), expert_tensor_parallel() if site.experts else tensor_parallel()
    size = ranks.size if site.rule.layout.sharded else 1
    _check_layout(site, wanted, size, dims)
    shapes = site.rule.layout.hf_shapes(tuple(site.weight.shape), size, dims)
    cut = size if site.kind == "column" else 1
    rows = {name: shape[0] // cut for name, shape in zip(site.projections, shapes, strict=True)}
    form = Form(
        rank=args.lora_rank,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        seed=args.seed or 0,
        sequence_parallel=config.sequence_parallel and ranks.size > 1,
    )
    parts: Parts = {"rows": rows, "targets": wanted, "order": _order(site, rows, dims)}
    inputs = site.weight.shape[1]
    adapter: Adapter
    if site.experts:
        adapter = ExpertAdapter(form, site.kind, site.rule, site.layer, inputs=inputs, count=site.experts, **parts)
    else:
        adapter = LinearAdapter(form, site.kind, site.rule, site.layer, inputs=inputs, **parts)
    site.linear.add_module(ADAPTER, adapter)
    # Before other hooks, which change the output of the whole layer.
    site.linear.register_forward_hook(adapter.hook, prepend=True)
    return True


def _check_layout(site: Site, wanted: list[str], size: int, dims: Dims) -> None:
    names = f"--lora-target-modules {' '.join(wanted)}"
    if isinstance(site.rule.layout, QueryKeyValue) and (groups := site.rule.layout.groups(dims)) % size:
        raise ValueError(
            f"{names}: --num-query-groups {groups} is not divisible by --tensor-model-parallel-size "
            f"{size}, so that ranks hold parts of a group; leave these targets out, or use fewer ranks"
        )
    if site.experts and size not in (1, tensor_parallel().size):
        raise ValueError(
            f"{names} of routed experts: --expert-tensor-parallel-size {size} must be 1 or "
            f"--tensor-model-parallel-size {tensor_parallel().size}"
        )


def _order(site: Site, rows: dict[str, int], dims: Dims) -> torch.Tensor | None:
    """Return which row of the projections, one below the other, is where in Megatron's weight; None: as they come."""
    total = sum(rows.values())
    numbered = torch.arange(total).split(list(rows.values()))
    order = numbered[0] if len(rows) == 1 else site.rule.layout.shard(numbered, 0, 1, dims)
    return None if torch.equal(order, torch.arange(total)) else order
