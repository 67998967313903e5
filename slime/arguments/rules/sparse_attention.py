"""Sparse attention (DeepSeek-V3.2, GLM-5): layers without an indexer use the selection of an earlier one."""

from __future__ import annotations

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import hf_config
from slime.models import hf_fields
from slime.models.megatron_flags import describe
from slime.models.stages import first_layers


def check(args: Args) -> None:
    """Every (virtual) pipeline stage must begin with a layer that selects: selections stay where they are made."""
    if args.hf_checkpoint is None or args.pipeline_model_parallel_size == 1:
        return
    found = hf_config.config_of(args)
    if found is None or hf_config.is_own_model(args, describe(found[0])):
        return
    config, name = found
    selects = hf_fields.selecting_layers(config)
    if len(selects) != args.num_layers:
        return  # another model, or the wrong number, which is reported with all that is wrong
    without = [layer for layer in first_layers(args) if not selects[layer]]
    if without:
        with_own = ", ".join(str(layer) for layer, own in enumerate(selects) if own)
        raise ArgumentError(
            f"pipeline stages begin with layers {', '.join(map(str, without))} of {name}, which use the keys that an "
            f"earlier layer's indexer selects, on another stage; let every stage begin with one of the layers "
            f"{with_own} (--decoder-first-pipeline-num-layers, --decoder-last-pipeline-num-layers, "
            "--pipeline-model-parallel-layout)"
        )
