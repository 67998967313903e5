"""Vision-language models: what needs a vision tower, and the layers that its features enter."""

from __future__ import annotations

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import hf_config
from slime.models import hf_fields
from slime.models.facts import family_of, takes_images
from slime.models.megatron_flags import describe
from slime.models.stages import stage_letters


def check(args: Args) -> None:
    """Images and a trained tower need a model with one; its features stay on the first (virtual) pipeline stage."""
    if args.hf_checkpoint is None:
        return
    found = hf_config.config_of(args)
    if found is None or args.custom_model_provider_path:
        return
    config, name = found
    if not takes_images(args.spec):
        _check_without_tower(args, config, name)
        return
    if args.mtp_num_layers:
        raise ArgumentError(
            f"--mtp-num-layers {args.mtp_num_layers}: MTP layers of vision-language models are not supported; leave it "
            f"out, or train the language model alone (another --spec than {' '.join(args.spec or ())})"
        )
    if args.train_vision_tower and args.lora_rank:
        raise ArgumentError("--train-vision-tower: --lora-rank freezes the whole model; leave one of them out")
    if args.train_vision_tower and args.update_weight_transport == "p2p":
        raise ArgumentError(
            "--train-vision-tower: --update-weight-transport p2p was never tried with the engines' vision towers; use "
            "another transport, or leave the tower as it is"
        )
    needed = hf_fields.deepstack_layers(config)
    virtual = args.virtual_pipeline_model_parallel_size or 1
    stages = stage_letters(args, args.num_layers, 0, args.pipeline_model_parallel_size, virtual)
    if (first := stages[0].count("t")) < needed:
        raise ArgumentError(
            f"the first pipeline stage has {first} layers, and features of the vision tower of {name} enter the first "
            f"{needed} layers; give it at least {needed} (--decoder-first-pipeline-num-layers, "
            "--pipeline-model-parallel-layout, fewer stages)"
        )


def _check_without_tower(args: Args, config: hf_fields.Config, name: str) -> None:
    option = "--train-vision-tower" if args.train_vision_tower else "--multimodal-keys" if args.multimodal_keys else ""
    if not option or hf_config.is_own_model(args, describe(config)):
        return
    images = (family_of(config) or {}).get("images")
    if images and "vision_config" in config:
        raise ArgumentError(
            f"{option}: {name} is a vision-language model, of which --spec {' '.join(args.spec or ())} builds the "
            f"language model alone; give --spec {' '.join(images)}"
        )
    raise ArgumentError(f"{option}: {name} describes no model with a vision tower; leave it out")
