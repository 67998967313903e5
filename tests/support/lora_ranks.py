"""Ranks of the tests of adapters, and the adapter that they start from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.ranks import error_of, loaded_model, new_trainer, switch_layout
from tests.support.trainer import PLAIN_SGD, make_train_data
from tests.support.trainer_ranks import hf_weights, parameters, train_once

RANK, ALPHA = 3, 6.0
LORA = {"lora_rank": RANK, "lora_alpha": ALPHA}
SGD = {**PLAIN_SGD, "lr": 0.5}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1}


def write_random_adapter(checkpoint: str, directory: Path, names: list[str], seed: int = 0) -> str:
    """Write, as PEFT would, an adapter with random A and B for the projections ``names`` of a checkpoint."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(Path(checkpoint) / "model.safetensors").items():
        if name.removesuffix(".weight").rpartition(".")[2] in names:
            start = f"base_model.model.{name.removesuffix('.weight')}"
            out, inputs = weight.shape
            tensors[f"{start}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
            tensors[f"{start}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) / 10
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": names, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return str(directory)


def adapters(trainer: Any) -> dict[str, torch.Tensor]:
    """Return copies of all adapters by PEFT's names (collective)."""
    from slime.backends.megatron_utils.lora.peft import iter_adapters

    return {name: tensor.detach().clone() for name, tensor in iter_adapters(trainer.model, trainer.args)}


def adapter_gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the last step by PEFT's names (collective)."""
    trained = [(p, p.data) for chunk in trainer.model for p in chunk.parameters() if p.requires_grad]
    for p, _ in trained:
        p.data = p.main_grad.to(p.dtype)
    found = adapters(trainer)
    for p, data in trained:
        p.data = data
    return found


def gradient_scenarios(scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Take one step of plain SGD per scenario: {"checkpoint", "adapter", "args"}; return metrics and gradients."""
    results = []
    for scenario in scenarios:
        flags = {**SGD, **KL, **LORA, "lora_adapter_path": scenario["adapter"], **scenario["args"]}
        trainer, _ = new_trainer(scenario["checkpoint"], with_ref=True, **flags)
        read, merged = adapters(trainer), hf_weights(trainer.model, trainer.args)
        report = train_once(trainer, 0, make_train_data(seed=3))
        after = adapters(trainer)
        results.append(
            {**report, "read": read, "merged": merged, "after": after, "gradients": adapter_gradients(trainer)}
        )
    return results


def scenarios_and_life(scenarios: list[dict[str, Any]], life: dict[str, str]) -> dict[str, Any]:
    """Do ``gradient_scenarios`` and ``life_of_adapters`` in one launch."""
    return {"gradients": gradient_scenarios(scenarios), "life": life_of_adapters(**life)}


def log_probs(trainer: Any, *, of_reference: bool = False) -> list[torch.Tensor]:
    """Return the log-probs of made-up samples, with the actor's weights or the reference's."""
    from slime.backends.megatron_utils.train.data import prepare_rollout_data
    from tests.support.trainer import make_shards

    shards = make_shards(trainer.args, make_train_data(seed=5), trainer.parallel_config)
    shard = shards[trainer.parallel_config["dp_rank"]]
    data = prepare_rollout_data(trainer.args, shard, trainer.device)
    with trainer._passes._policy("ref" if of_reference else "actor"):
        return [x.clone() for x in trainer._passes._forward_only(data, "")["log_probs"]]


def life_of_adapters(checkpoint: str, other: str, folder: str) -> dict[str, Any]:
    """Start, train, save, resume and export; the test module says what each entry must be."""
    found: dict[str, Any] = {}
    plain, _ = new_trainer(checkpoint)
    found["base"] = log_probs(plain)
    base = hf_weights(plain.model, plain.args)

    save, hf = f"{folder}/save", f"{folder}/hf"
    flags = {**KL, **LORA, "save": save, "save_hf": hf, "with_ref": True, "lr": 1e-2}
    trainer, found["start"] = new_trainer(checkpoint, **flags)
    found["at first"] = log_probs(trainer)
    found["trained"] = [n for c in trainer.model for n, p in c.named_parameters() if p.requires_grad]
    train_once(trainer, 0, make_train_data(seed=0))
    trainer.save(0, force_sync=True)
    found["saved"], found["merged"] = adapters(trainer), hf_weights(trainer.model, trainer.args)
    found["weights of the base"] = base
    found["after a step"], found["reference"] = log_probs(trainer), log_probs(trainer, of_reference=True)
    found["bytes of copies"] = trainer._backup.host_bytes
    train_once(trainer, 1, make_train_data(seed=1))
    found["uninterrupted"] = parameters(trainer)

    trainer, found["start again"] = new_trainer(checkpoint, load=save, **flags)
    found["loaded"] = adapters(trainer)
    train_once(trainer, 1, make_train_data(seed=1))
    found["resumed"] = parameters(trainer)
    merged, _ = new_trainer(hf)
    found["log-probs of the export"] = log_probs(merged)
    imported, _ = new_trainer(checkpoint, lora_adapter_path=f"{save}/iter_0000000/adapter", **flags)
    found["imported"] = adapters(imported)

    from slime.backends.megatron_utils.checkpoints.torch_dist import TorchDistCheckpoint

    found["conversion"] = error_of(lambda: TorchDistCheckpoint(save))
    for name, (path, changed) in {
        "another base": (other, flags), "another rank": (checkpoint, {**flags, "lora_rank": 5}), "no adapters":
        (checkpoint, {"save": save}), "unknown targets": (checkpoint, {**flags, "lora_target_modules": ["q_porj"]}),
    }.items():  # fmt: skip
        found[name] = error_of(lambda path=path, changed=changed: new_trainer(path, load=save, **changed))
    return found


def push_adapters(checkpoint: str, directories: list[str], engine: dict[str, Any]) -> dict[str, Any]:
    """Push one adapter after the other to an engine; return versions and bytes."""
    from types import SimpleNamespace

    from slime.backends.megatron_utils.lora.peft import load_adapter
    from slime.servers.types import EngineInfo
    from slime.weight_sync import create_updater
    from tests.support.megatron_model import model_args

    flags = ("--lora-rank", RANK, "--lora-alpha", ALPHA, "--lora-sync", "adapter")
    args = model_args(checkpoint, *flags)
    switch_layout(args)
    model = loaded_model(args, checkpoint, ddp=False)
    updater = create_updater(args, SimpleNamespace(model=model, args=args), synchronous_loop=True)
    updater.connect([EngineInfo(**engine)])
    versions, sent = [], []
    for directory in directories:
        load_adapter(model, args, directory)
        versions.append(updater.update())
        sent.append(updater.bytes_sent)
    updater.disconnect()
    return {"versions": versions, "bytes": sent}


def all_families(checkpoints: dict[str, str], layouts: dict[str, tuple[Any, ...]], scratch: str) -> dict[str, Any]:
    """Return by layout and family of ``checkpoints`` how far adapters are from what their merged weights compute.

    See ``_compare``.
    """
    from tests.support.megatron_model import model_args
    from tests.support.model_families import families_of

    results = {}
    for layout, flags in layouts.items():
        names = [name for name in families_of(layout) if name in checkpoints]
        switch_layout(model_args(checkpoints[names[0]], *flags))
        for name in names:
            merged = f"{scratch}/{layout}-{name}"
            results[f"{layout}/{name}"] = _compare(checkpoints[name], flags, merged)
    return results


def _compare(checkpoint: str, flags: tuple[Any, ...], merged: str) -> dict[str, Any]:
    """Run a model with random adapters, and one with what it exports: ``W + s B A``, whose gradient is G.

    Returns the names of the adapters, the largest difference of the logits, and that of the gradients from
    ``dB = s G A'`` and ``dA = s B' G``, over the norm of all.
    """
    from slime.backends.megatron_utils.weights import export_hf
    from tests.support.megatron_model import hf_gradients, model_args, run_pack

    lora = ("--lora-rank", RANK, "--lora-alpha", ALPHA, "--moe-router-bias-update-rate", 0)
    args = model_args(checkpoint, *flags, *lora)
    args.use_distributed_optimizer = False  # so that every rank has all gradients
    model = loaded_model(args, checkpoint)
    adapters = _randomize(model, args)
    forward = run_pack(model, args)
    export_hf(model, args, merged)
    with torch.no_grad():
        for parameter in (p for chunk in model for p in chunk.parameters() if p.requires_grad):
            parameter.copy_(parameter.main_grad)
    seen = _all_adapters(model, args)

    args.lora_rank = 0
    whole = loaded_model(args, merged)
    expected = run_pack(whole, args)
    weights = dict(hf_gradients(whole, args))
    errors = {}
    for name, gradient in seen.items():
        start = name.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
        weight = weights[start.removeprefix("base_model.model.") + ".weight"]
        a, b = adapters[f"{start}.lora_A.weight"], adapters[f"{start}.lora_B.weight"]
        chain = ALPHA / RANK * (b.T @ weight if name.endswith("lora_A.weight") else weight @ a.T)
        errors[name] = (gradient - chain).norm()
    total = torch.stack([gradient.norm() for gradient in seen.values()]).norm()
    assert (forward is None) == (expected is None)
    apart = 0.0 if forward is None or expected is None else (forward["logits"] - expected["logits"]).abs().max()
    return {"names": sorted(seen), "logits": float(apart), "gradients": float(max(errors.values()) / total)}


def _randomize(model: Any, args: Any) -> dict[str, torch.Tensor]:
    """Give every adapter random numbers that its name decides; return them whole."""
    import zlib

    from slime.backends.megatron_utils.lora.peft import adapter_weights_of
    from slime.backends.megatron_utils.state.parallel import unwrap
    from slime.backends.megatron_utils.weights.naming import model_dims, model_family

    dims = model_dims(args, unwrap(model[0]).config)
    with torch.no_grad():
        for weight in adapter_weights_of(model, args, model_family(args)):
            generator = torch.Generator().manual_seed(zlib.crc32(weight.name.encode()))
            full = torch.randn(weight.hf_shapes(dims)[0], generator=generator) / 10
            ranks = weight.tensor_ranks
            weight.parameter.copy_(weight.rule.layout.shard([full], ranks.rank, ranks.size, dims))
    return _all_adapters(model, args)


def _all_adapters(model: Any, args: Any) -> dict[str, torch.Tensor]:
    from slime.backends.megatron_utils.lora.peft import iter_adapters

    return {name: tensor.detach().clone() for name, tensor in iter_adapters(model, args)}
