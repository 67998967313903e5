"""MTP layers: random ones for tiny checkpoints, and their loss by transformers and autograd.

Names and order of concatenation are those of the families' own code (MiMo-7B's ``modeling_mimo.py``, and SGLang's
models for the others), written down here once more.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Names:
    """Names of a family's parts of layer ``i`` of ``n`` decoder layers; ``{i}`` and ``{n}`` (``n + i``) are put in.

    ``hidden_first``: whether the projection takes hidden states before embeddings.
    """

    layer: str
    embeddings_norm: str
    hidden_norm: str
    projection: str
    final_norm: str
    hidden_first: bool = False
    copies: bool = False

    def of(self, part: str, i: int, layers: int) -> str:
        """Return the tensor's or the layer's name."""
        return getattr(self, part).format(i=i, n=layers + i)


MIMO = Names(
    "model.mtp_layers.{i}.",
    "model.mtp_layers.{i}.token_layernorm.weight",
    "model.mtp_layers.{i}.hidden_layernorm.weight",
    "model.mtp_layers.{i}.input_proj.weight",
    "model.mtp_layers.{i}.final_layernorm.weight",
    hidden_first=True,
)
DEEPSEEK = Names(
    "model.layers.{n}.",
    "model.layers.{n}.enorm.weight",
    "model.layers.{n}.hnorm.weight",
    "model.layers.{n}.eh_proj.weight",
    "model.layers.{n}.shared_head.norm.weight",
    copies=True,
)
QWEN = Names(
    "mtp.layers.{i}.",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.fc.weight",
    "mtp.norm.weight",
)
COPIES = {"model.layers.{n}.embed_tokens.weight": "model.embed_tokens.weight"}
COPIES["model.layers.{n}.shared_head.head.weight"] = "lm_head.weight"


def add_layers(checkpoint: str | Path, out: str | Path, names: Names, count: int, *, seed: int = 23) -> str:
    """Copy ``checkpoint`` (of transformers' own names) to ``out`` with ``count`` random layers; return the path.

    Each has a decoder layer like the last one; below ``out/layer-<i>`` is a checkpoint of that layer alone as a model
    of one layer, whose final norm is the layer's.
    """
    from safetensors.torch import load_file, save_file

    out = Path(out)
    shutil.copytree(checkpoint, out, dirs_exist_ok=True)
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{layers - 1}."
    generator = torch.Generator().manual_seed(seed)

    def noise(name: str, shape: Sequence[int]) -> Tensor:
        dtype = tensors["model.norm.weight"].dtype
        values = torch.randn(tuple(shape), generator=generator).to(dtype)
        return 1 + 0.3 * values if "norm" in name else 0.3 * values if "bias" in name else 0.15 * values

    added: dict[str, Tensor] = {}
    for i in range(count):
        of_layer = {
            name.removeprefix(last): noise(name, t.shape) for name, t in tensors.items() if name.startswith(last)
        }
        added |= {names.of("layer", i, layers) + name: tensor for name, tensor in of_layer.items()}
        for part in ("embeddings_norm", "hidden_norm", "final_norm"):
            added[names.of(part, i, layers)] = noise("norm", (hidden,))
        added[names.of("projection", i, layers)] = noise("projection", (hidden, 2 * hidden))
        if names.copies:
            added |= {copy.format(n=layers + i): tensors[original].clone() for copy, original in COPIES.items()}
        alone = {f"model.layers.0.{name}": tensor for name, tensor in of_layer.items()}
        alone["model.norm.weight"] = added[names.of("final_norm", i, layers)]
        alone |= {n: t for n, t in tensors.items() if n in ("model.embed_tokens.weight", "lm_head.weight")}
        folder = out / f"layer-{i}"
        folder.mkdir(exist_ok=True)
        save_file({n: t.clone() for n, t in alone.items()}, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(_of_one_layer(config)))
    save_file({**tensors, **added}, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return str(out)


def _of_one_layer(config: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"num_hidden_layers": 1}
    if "layer_types" in config:
        fields["layer_types"] = config["layer_types"][-1:]
    if "mlp_layer_types" in config:
        fields["mlp_layer_types"] = config["mlp_layer_types"][-1:]
    if "first_k_dense_replace" in config:
        fields["first_k_dense_replace"] = 0
    return {**config, **fields}


def as_mimo(path: str) -> None:
    """Call the Qwen2 checkpoint in ``path`` a MiMo: that is what it has the layers of."""
    config = json.loads((Path(path) / "config.json").read_text())
    (Path(path) / "config.json").write_text(json.dumps({**config, "model_type": "mimo"}))


def losses(
    checkpoint: str, model_type: str, names: Names, count: int, data: dict[str, list[Any]], *, per_token: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the loss of every layer as the sum over samples, and the parameters of the layers by their names.

    One sequence after the other, in float64 as far as the family's code has it. ``data`` has ``tokens``,
    ``response_lengths``, ``loss_masks`` and ``rollout_mask_sums``; ``model_type`` is that of transformers. Hidden
    states, embedding and output layer are taken for given; the parameters want gradients.
    """
    from safetensors.torch import load_file

    trunk = _model(checkpoint, model_type)
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    layers = trunk.config.num_hidden_layers
    parameters: dict[str, Tensor] = {}
    models = []
    for i in range(count):
        model = _model(f"{checkpoint}/layer-{i}", model_type)
        models.append(model)
        own = names.of("layer", i, layers)
        for name, parameter in model.named_parameters():
            if name.startswith("model.layers.0."):
                parameters[own + name.removeprefix("model.layers.0.")] = parameter
        parameters[names.of("final_norm", i, layers)] = model.model.norm.weight
        for part in ("embeddings_norm", "hidden_norm", "projection"):
            name = names.of(part, i, layers)
            parameters[name] = tensors[name].double().requires_grad_()
    totals = [torch.zeros((), dtype=torch.float64) for _ in range(count)]
    for tokens, response, mask, mask_sum in zip(
        data["tokens"], data["response_lengths"], data["loss_masks"], data["rollout_mask_sums"], strict=True
    ):
        whole = torch.tensor(tokens)
        full_mask = torch.zeros(len(tokens), dtype=torch.float64)
        full_mask[len(tokens) - response :] = torch.tensor(mask, dtype=torch.float64)
        with torch.no_grad():
            hidden = trunk.model(whole[None], use_cache=False).last_hidden_state[0]
            embedded = trunk.get_input_embeddings()(whole)
            head = trunk.get_output_embeddings().weight
        for i, model in enumerate(models):
            k = i + 1
            norm = model.model.norm
            pair = [
                _normed(norm, embedded[k:], parameters[names.of("embeddings_norm", i, layers)]),
                _normed(norm, hidden[: len(tokens) - k], parameters[names.of("hidden_norm", i, layers)]),
            ]
            projection = parameters[names.of("projection", i, layers)]
            inputs = torch.cat(pair[::-1] if names.hidden_first else pair, dim=-1) @ projection.T
            hidden = model.model(inputs_embeds=inputs[None], use_cache=False).last_hidden_state[0]
            log_probs = F.log_softmax(hidden[:-1] @ head.T, dim=-1)
            further = whole[k + 1 :]
            cross_entropy = -log_probs.gather(1, further[:, None])[:, 0]
            totals[i] = totals[i] + (cross_entropy * full_mask[k + 1 :]).sum() / (1 if per_token else max(mask_sum, 1))
    return totals, parameters


def _normed(norm: torch.nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    """Apply a norm of this kind with another weight."""
    return torch.func.functional_call(norm, {"weight": weight}, (x,))


def _model(path: str, model_type: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type].from_pretrained(path)
    config.model_type = model_type
    config._experts_implementation = "eager"  # the grouped kernel has no float64
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float64, attn_implementation="eager")
