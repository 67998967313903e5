"""Ranks of ``tests/integration/test_mtp.py``."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from tests.support import float64
from tests.support.model_families import LAYOUTS
from tests.support.mtp import MIMO, Names, losses
from tests.support.ranks import arrays, error_of, loaded_model, new_trainer, switch_layout
from tests.support.trainer import make_train_data

ON: dict[str, Any] = {"mtp_num_layers": 2, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3}
MODES: dict[str, dict[str, Any]] = {"carried": {}, "frozen": {"mtp_num_layers": 2}, "trained": ON}


def one_process(
    checkpoint: str, plain: str, scenarios: dict[str, dict[str, Any]], steps: dict[str, Any]
) -> dict[str, Any]:
    """Return in float64 what ``trainer_ranks.gradients`` says of ``scenarios``, and two rollouts in every mode.

    And, by whether they are per token, the losses of ``mtp.losses`` and their gradients: ``plain`` is the checkpoint
    under a name that transformers knows.
    """
    float64.enable()
    from tests.support.trainer_ranks import gradients, hf_weights, train_once

    listed = [{"args": {"load": checkpoint, "lr": 0.0, **args}, "data": {"seed": 3}} for args in scenarios.values()]
    found: dict[str, Any] = dict(zip(scenarios, gradients(checkpoint, listed), strict=True))
    for mode, flags in MODES.items():
        trainer, _ = new_trainer(checkpoint, load=checkpoint, **steps, **flags)
        reports = [train_once(trainer, i, make_train_data(seed=i)) for i in range(2)]
        found[mode] = {"reports": reports, "weights": arrays(hf_weights(trainer.model, trainer.args))}
    for name in scenarios:
        found[name]["gradients"] = arrays(found[name]["gradients"])
    found["refused"] = _refused(checkpoint)
    found["plain"] = {per_token: _plain(plain, per_token=per_token) for per_token in (False, True)}
    return found


def _plain(checkpoint: str, *, per_token: bool) -> tuple[list[float], dict[str, Any]]:
    totals, parameters = losses(checkpoint, "qwen2", MIMO, 2, make_train_data(seed=3), per_token=per_token)
    sum(totals).backward()  # type: ignore[union-attr]
    return [float(total.detach()) for total in totals], arrays({n: p.grad for n, p in parameters.items()})


def _refused(checkpoint: str) -> dict[str, str]:
    """Return what is said of wrong numbers of layers, and of a model that has none."""
    from slime.backends.megatron_utils.model.provider import get_model

    said = {
        f"{count} layers": error_of(lambda n=count: new_trainer(checkpoint, load=checkpoint, mtp_num_layers=n))
        for count in (1, 3)
    }
    trainer, _ = new_trainer(checkpoint)
    provider = f"{__name__}.plain_provider"
    args = Namespace(**{**vars(trainer.args), "mtp_num_layers": 2, "custom_model_provider_path": provider})
    plain_provider.args = trainer.args  # type: ignore[attr-defined]
    return {**said, "no module": error_of(lambda: get_model(args))}


def plain_provider(pre_process: bool, post_process: bool) -> torch.nn.Module:
    """Build a model without such layers, whatever the flags say."""
    from slime.backends.megatron_utils.model.provider import model_provider, transformer_config_from_args

    args: Namespace = plain_provider.args  # type: ignore[attr-defined]
    return model_provider(args, transformer_config_from_args(args))(pre_process, post_process)


def families(checkpoints: dict[str, str], scratch: str, layouts: list[str], dense: tuple[str, ...]) -> dict[str, Any]:
    """Return per layout and family the weights after a round trip, and losses and gradients of the layers in fp32."""
    from tests.support.megatron_model import model_args

    found = {}
    for layout in layouts:
        here = {name: path for name, path in checkpoints.items() if layout != "ep2" or name not in dense}
        switch_layout(model_args(next(iter(here.values())), *LAYOUTS[layout]))
        for name, checkpoint in here.items():
            folder = Path(scratch) / f"{name}-{layout}"
            found[f"{layout}/{name}"] = _family(checkpoint, LAYOUTS[layout], folder)
    return found


def _family(checkpoint: str, flags: tuple[Any, ...], export_to: Path) -> dict[str, Any]:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config

    from slime.backends.megatron_utils.model.mtp_model import borrow_embedding
    from slime.backends.megatron_utils.state.parallel import data_parallel
    from slime.backends.megatron_utils.train.logprob_passes import run_schedule
    from slime.backends.megatron_utils.train.loss import loss_function
    from slime.backends.megatron_utils.weights import describe_hf_weights, export_hf, iter_hf_weights
    from tests.support.megatron_model import hf_gradients, model_args

    args = model_args(checkpoint, *flags, "--mtp-num-layers", 1, "--enable-mtp-training")
    args.use_distributed_optimizer = False  # so that every rank has all gradients
    args.loss_type, args.data_pad_size_multiplier = "sft_loss", 8
    model = loaded_model(args, checkpoint)
    export_hf(model, args, export_to)
    weights = [(name, tensor.clone()) for name, tensor in iter_hf_weights(model, args, gather_pp=True)]
    own = [(name, tuple(tensor.shape)) for name, tensor in iter_hf_weights(model, args)]
    described = [(name, shape) for name, shape, _ in describe_hf_weights(model, args)]
    data = _columns(make_train_data(prompts=2, seed=5))
    kept: list[dict[str, Any]] = []

    def finish(batch: dict[str, Any]) -> Any:
        batch["global_batch_size"] = len(data["tokens"]) * data_parallel().size

        def loss(logits: torch.Tensor) -> Any:
            result = loss_function(args, batch, 2, 0 * logits)  # what remains is the layers' own loss
            kept.append(dict(zip(result[-1]["keys"], result[-1]["values"][1:].tolist(), strict=True)))
            return result

        return loss

    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.zero_grad_buffer()
    with borrow_embedding(args, model):
        run_schedule(args, model, data, [[0, 1, 2], [3]], finish, forward_only=False)
    seen = sum(report["mtp_loss"] for report in kept)
    return {"weights": weights, "described": own == described, "loss": seen, "gradients": hf_gradients(model, args)}


def _columns(data: dict[str, list[Any]]) -> dict[str, Any]:
    """Return train data as a rank has it."""
    return {
        "tokens": [torch.tensor(tokens) for tokens in data["tokens"]],
        "loss_masks": [torch.tensor(mask, dtype=torch.float32) for mask in data["loss_masks"]],
        "response_lengths": data["response_lengths"],
        "total_lengths": [len(tokens) for tokens in data["tokens"]],
        "rollout_mask_sums": data["rollout_mask_sums"],
    }


def make_family(folder: Path, name: str, names: Names) -> str:
    """Write the tiny checkpoint of the family ``name`` with a layer that predicts a further token; return its path.

    Below it is what ``mtp.losses`` reads.
    """
    from tests.support.model_families import make_checkpoint
    from tests.support.mtp import add_layers

    return add_layers(make_checkpoint(folder, name), folder / f"{name}-predicting", names, 1)


def as_whole(checkpoint: str, out: Path, model_type: str) -> str:
    """Write the checkpoint as the language model of a vision-language model with stacked experts; return its path."""
    from safetensors.torch import load_file, save_file

    from tests.support.model_families import in_a_whole_model
    from tools.tiny_model import stacked_experts

    out.mkdir()
    text = json.loads((Path(checkpoint) / "config.json").read_text())
    whole = {"model_type": model_type, "tie_word_embeddings": text["tie_word_embeddings"], "text_config": text}
    (out / "config.json").write_text(json.dumps(whole))
    stored = stacked_experts(load_file(Path(checkpoint) / "model.safetensors"))
    tensors = in_a_whole_model(stored, "qwen3_5")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return str(out)
