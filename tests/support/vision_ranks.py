"""Ranks of ``tests/integration/test_vision_trainer.py``, and the samples that they train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.megatron_model import hf_gradients, model_args, run_pack
from tests.support.ranks import error_of, loaded_model, new_trainer, switch_layout
from tests.support.trainer import PLAIN_SGD, make_train_data
from tests.support.trainer_ranks import hf_weights, train_once
from tests.support.vision_families import END, IMAGE, PATCH, START, TEXT, VIDEO, joined, samples

Grid = tuple[int, int, int]
GROUPS: tuple[list[Grid], ...] = ([(1, 4, 6)], [], [(1, 4, 4), (1, 2, 6)], [(1, 6, 4)])
"""Images of the prompts of a rollout, each of which has two samples."""
OBSERVED: dict[int, Grid] = {1: (1, 4, 2), 2: (1, 2, 4)}
"""Images that an environment shows within the responses to a prompt, which are not trained."""


def image_train_data(*, seed: int = 3) -> dict[str, Any]:
    """Return train data with images in prompts, which the samples of a prompt share, and within responses."""
    data = make_train_data(vocab_size=TEXT, prompts=len(GROUPS), seed=seed, shortest=5)
    generator = torch.Generator().manual_seed(seed)
    given: list[dict[str, torch.Tensor] | None] = []
    for group, grids in enumerate(GROUPS):
        shown = [*grids, *([OBSERVED[group]] if group in OBSERVED else [])]
        pixels = torch.randn(sum(t * h * w for t, h, w in shown), PATCH, generator=generator)
        inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor(shown)} if shown else None
        for sample in (2 * group, 2 * group + 1):
            if group in OBSERVED:
                _observe(data, sample, _tokens(OBSERVED[group]))
            data["tokens"][sample] = [token for grid in grids for token in _tokens(grid)] + data["tokens"][sample]
            given.append(inputs)
    return {**data, "multimodal_train_inputs": given}


def _tokens(grid: Grid) -> list[int]:
    return [START, *[IMAGE] * (grid[0] * grid[1] * grid[2] // 4), END]


def _observe(data: dict[str, Any], sample: int, tokens: list[int]) -> None:
    """Put ``tokens`` before the last two of the response."""
    data["tokens"][sample][-2:-2] = tokens
    data["loss_masks"][sample][-2:-2] = [0] * len(tokens)
    data["rollout_log_probs"][sample][-2:-2] = [0.0] * len(tokens)
    data["response_lengths"][sample] += len(tokens)


class WithImages(torch.nn.Module):
    """A model of transformers for ``plain_grpo``, which knows tokens alone: it finds the images of ``data`` by them.

    ``forbids``: placeholders are not sampled.
    """

    def __init__(self, model: Any, data: dict[str, Any], *, trains_tower: bool, forbids: bool = False) -> None:
        super().__init__()
        self.forbids = forbids
        self.model = model
        self.inputs = {tuple(t): i for t, i in zip(data["tokens"], data["multimodal_train_inputs"], strict=True)}
        model.model.visual.requires_grad_(trains_tower)

    def forward(self, tokens: torch.Tensor) -> Any:
        images = self.inputs[tuple(tokens[0].tolist())] or {}
        if images:
            images = {**images, "mm_token_type_ids": (tokens == IMAGE).int()}
        self.model.model.rope_deltas = None
        output = self.model(tokens, **images)
        if self.forbids:  # but where a placeholder comes next
            rows = ~torch.isin(tokens[0].roll(-1), torch.tensor([IMAGE, VIDEO]))
            without = torch.zeros_like(output.logits[0])
            without[rows.nonzero(), torch.tensor([IMAGE, VIDEO])] = -1000.0
            output.logits = output.logits + without
        return output

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)


def trained(checkpoint: str, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train one rollout per scenario with plain SGD; return the metrics and the gradients of the last step."""
    results = []
    for scenario in scenarios:
        with_ref = bool(scenario.get("use_kl_loss"))
        trainer, _ = new_trainer(checkpoint, with_ref=with_ref, **{**PLAIN_SGD, **scenario})
        report = train_once(trainer, 0, image_train_data())
        results.append({**report, "gradients": dict(hf_gradients(trainer.model, trainer.args))})
    return results


def saved(checkpoint: str, save: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train a rollout under the first of ``layouts``, save, and train another; load under each and train that there.

    Return the weights before, saved and after, and the metrics of the second rollout; last what a run says that leaves
    the tower frozen.
    """
    first, second = image_train_data(seed=0), image_train_data(seed=1)
    options = {"adam_eps": 1e-3, "lr": 1e-2, "train_vision_tower": True}
    trainer, _ = new_trainer(checkpoint, save=save, **layouts[0], **options)
    before = hf_weights(trainer.model, trainer.args)
    train_once(trainer, 0, first)
    kept = hf_weights(trainer.model, trainer.args)
    trainer.save(0, force_sync=True)
    results = [{"before": before, "loaded": kept, **_second(trainer, second)}]
    for layout in layouts:
        trainer, _ = new_trainer(checkpoint, load=save, save=save, **layout, **options)
        loaded = hf_weights(trainer.model, trainer.args)
        results.append({"loaded": loaded, **_second(trainer, second)})
    frozen = {**layouts[0], **options, "train_vision_tower": False}
    results.append({"frozen": error_of(lambda: new_trainer(checkpoint, load=save, save=save, **frozen))})
    return results


def without_tower(checkpoint: str, other: str, converted: str, save: str) -> dict[str, Any]:
    """Load checkpoints without a tower into runs that train it, built with the values of ``other``.

    Return the weights after loading the ``converted`` one, and that of a run that left the tower frozen; and what is
    said where optimizer state is asked for.
    """
    trains = {"train_vision_tower": True}
    trainer, _ = new_trainer(other, load=converted, no_load_optim=True, **trains)
    found: dict[str, Any] = {"converted": hf_weights(trainer.model, trainer.args)}
    trainer, _ = new_trainer(other, load=converted, no_load_optim=True)
    found["converted, frozen"] = hf_weights(trainer.model, trainer.args)
    frozen, _ = new_trainer(checkpoint, save=save)
    frozen.save(0, force_sync=True)
    found["refused"] = error_of(lambda: new_trainer(other, load=save, **trains))
    trainer, found["next rollout"] = new_trainer(other, load=save, no_load_optim=True, **trains)
    found["saved"] = hf_weights(trainer.model, trainer.args)
    train_once(trainer, 1, image_train_data())
    found["trained"] = hf_weights(trainer.model, trainer.args)
    return found


def _second(trainer: Any, data: dict[str, Any]) -> dict[str, Any]:
    steps = train_once(trainer, 1, data)["steps"]
    return {"steps": steps, "weights": hf_weights(trainer.model, trainer.args)}


def in_bf16(checkpoint: str) -> dict[str, dict[str, Any]]:
    """Return the dtypes of a tower's weights, its frequencies, and logits, with a frozen and a trained tower."""
    from slime.backends.megatron_utils.state.parallel import unwrap

    pack, found = samples(), {}
    for name, flags in (("frozen", ()), ("trained", ("--train-vision-tower",))):
        args = model_args(checkpoint, *flags)
        args.bf16, args.fp32 = True, False  # which the parser leaves to GPUs
        switch_layout(args)
        model = loaded_model(args, checkpoint)
        tower: Any = unwrap(model[0]).tower
        forward = run_pack(model, args, pack.tokens, **joined(pack))
        assert forward is not None
        found[name] = {
            "weights": {parameter.dtype for parameter in tower.parameters()},
            "frequencies": tower.rotary_pos_emb.inv_freq,
            "logits": forward["logits"],
        }
    return found


def offloaded(checkpoint: str) -> dict[str, Any]:
    """Return how many bytes of a frozen tower are left after offloading, and whether it is the same afterwards."""
    from slime.backends.megatron_utils.state.offload import Offloader
    from slime.backends.megatron_utils.state.parallel import unwrap

    trainer, _ = new_trainer(checkpoint)
    tower = unwrap(trainer.model[0]).tower
    tensors = [*tower.parameters(), *tower.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    offloader = Offloader(trainer.model, trainer.optimizer)
    offloader.offload()
    left = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    offloader.onload()
    same = all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, before, strict=True))
    return {"tensors": len(tensors), "left": left, "same": same}


def refused(checkpoint: str, text_checkpoint: str) -> dict[str, str]:
    """Return the messages for samples whose images are wrong."""

    def message(checkpoint: str | Path, change: Any) -> str:
        data = image_train_data()
        change(data)
        trainer, _ = new_trainer(checkpoint)
        return error_of(lambda: train_once(trainer, 0, data))

    def sampled(data: dict[str, Any]) -> None:
        data["tokens"][5][-2] = IMAGE

    def video(data: dict[str, Any]) -> None:
        data["multimodal_train_inputs"][5] = {"pixel_values_videos": torch.zeros(4, PATCH)}

    def fewer_pixels(data: dict[str, Any]) -> None:
        inputs = data["multimodal_train_inputs"][5]
        data["multimodal_train_inputs"][5] = {**inputs, "pixel_values": inputs["pixel_values"][1:]}

    def nothing(data: dict[str, Any]) -> None:
        data["multimodal_train_inputs"][5] = None

    changes = {"sampled": sampled, "video": video, "fewer pixels": fewer_pixels, "no images": nothing}
    found = {name: message(checkpoint, change) for name, change in changes.items()}
    return {**found, "a language model": message(text_checkpoint, lambda data: None)}
