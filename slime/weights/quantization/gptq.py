"""INT4 by GPTQ (Frantar et al. 2022, arXiv:2210.17323): weights rounded so that outputs on given texts change least.

llmcompressor calibrates; the checkpoint is written from its numbers as every other conversion writes one.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slime.utils.atomic_file import write_atomically
from slime.utils.prompt_files import read_file, split_slice
from slime.weights.hf import writer as hf_writer
from slime.weights.hf.checkpoint import HfCheckpoint
from slime.weights.quantization.files import Chosen, Named, described, rewrite, state_of
from slime.weights.quantization.formats import Int4

PACKAGES = "llmcompressor==0.13.0 accelerate datasets multiprocess nvidia-ml-py pandas python-dateutil six"
"""The last llmcompressor that takes the compressed-tensors of SGLang 0.5.20, and what it imports."""


@dataclass(frozen=True)
class Calibration:
    """``samples`` windows of ``length`` tokens of the joined texts in ``data``, a file with a column ``text``.

    ``dampening``: what is added to the diagonal of each Hessian, as a part of its mean. ``trust_remote_code``: run the
    code of the checkpoint.
    """

    data: str
    samples: int = 256
    length: int = 2048
    dampening: float = 0.01
    trust_remote_code: bool = False


def gptq_checkpoint(
    source: Path,
    target: Path,
    form: Int4,
    rules: Sequence[str],
    calibration: Calibration,
    *,
    workers: int = 1,
    force: bool = False,
) -> None:
    """Write ``target`` as ``quantize_checkpoint`` does, with the linear layers rounded by GPTQ.

    The model runs whole, one layer after the other on the GPU if there is one. A conversion that was killed begins
    again, or, when it had calibrated, continues with writing. What transformers does not build of the checkpoint
    (layers for multi-token prediction) stays as it is. Raises as ``quantize_checkpoint``, and ValueError without
    llmcompressor, for texts that are too short, and when transformers builds none of the layers.
    """
    hf_writer.check_output(target, force=force, sources={"the checkpoint": source})
    weights = Chosen.of(source, form, rules)
    _check_installed()
    file = Path(split_slice(calibration.data)[0])
    if not file.is_file():
        raise FileNotFoundError(f"the calibration data {file} does not exist")
    with HfCheckpoint(source) as checkpoint:
        files = sorted({checkpoint.file_of(name) for name in checkpoint.names})
    made_of = {
        "format": described(form), "rules": list(rules), "calibration": asdict(calibration), "data": state_of(file),
        "source": str(source.resolve()), "files": [state_of(path) for path in files],
    }  # fmt: skip
    calibrated, words = target.with_name(f".{target.name}.calibrated"), json.dumps(made_of)
    note = calibrated / hf_writer.MADE_OF
    if not (note.is_file() and note.read_text() == words):
        if calibrated.exists():
            shutil.rmtree(calibrated)
        calibrated.parent.mkdir(parents=True, exist_ok=True)
        calibrate(weights, calibrated, form, calibration)
        write_atomically(note, words.encode(), durable=True)
    with HfCheckpoint(calibrated) as rounded:
        rounded.open_all()
        built = frozenset(name for name in weights.names if name + form.marker in rounded.names)
        if absent := weights.names - built:
            print(f"{len(absent)} weights that transformers does not build stay as they are: {sorted(absent)[0]} ...",
                  file=sys.stderr)  # fmt: skip

        def transform(checkpoint: HfCheckpoint, names: Sequence[str]) -> Named:
            for name in names:
                if name not in built:
                    yield name, checkpoint.tensor(name)
                    continue
                for suffix in form.suffixes:
                    tensor = rounded.tensor(name + suffix)
                    yield name + suffix, tensor.to(torch.int32) if suffix == "_shape" else tensor

        config = replace(weights, names=built).config(form, rules)
        rewrite(source, target, transform, config, made_of, workers=workers, force=force)
    shutil.rmtree(calibrated)


def calibrate(weights: Chosen, target: Path, form: Int4, calibration: Calibration) -> None:
    """Let llmcompressor round ``weights`` in the model, and save the model to the new directory ``target``."""
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trust = calibration.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(weights.source, trust_remote_code=trust)
    rows = windows(tokenizer, calibration)
    model = AutoModelForCausalLM.from_pretrained(weights.source, dtype="auto", trust_remote_code=trust)
    linearize_moe(model)  # transformers stacks experts, which have separate names then
    targets = sorted(
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in weights.names
    )
    if not targets:
        raise ValueError(
            f"{weights.source}: transformers builds {type(model).__name__}, which has none of the layers to quantize, "
            f"such as {min(weights.names)}; without calibration they can be rounded to nearest"
        )
    numbers = {"num_bits": 4, "type": "int", "strategy": "group",
               "group_size": form.group_size, "symmetric": form.symmetric}  # fmt: skip
    recipe = GPTQModifier(
        config_groups={"group_0": {"targets": targets, "weights": numbers}}, dampening_frac=calibration.dampening
    )
    texts: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
    loader: Any = torch.utils.data.DataLoader(texts, batch_size=1)
    oneshot(model=model, processor=tokenizer, dataset=loader, recipe=[recipe], pipeline="sequential")
    model.save_pretrained(target, save_compressed=True)


def windows(tokenizer: Callable[..., Mapping[str, Any]], calibration: Calibration) -> torch.Tensor:
    """Return random windows [samples, length] (int64) of the joined texts, the same ones every time.

    Raises ValueError for texts of fewer tokens than one window has.
    """
    texts = [str(row["text"]) for row in read_file(calibration.data) if row.get("text")]
    ids = list(chain.from_iterable(tokenizer(texts, add_special_tokens=False)["input_ids"])) if texts else []
    last = len(ids) - calibration.length
    if last < 0:
        raise ValueError(
            f"the calibration data {calibration.data} has {len(ids)} tokens in its column 'text', and one sample has "
            f"{calibration.length} (--max-sequence-length)"
        )
    chance = random.Random(0)
    begins = [chance.randint(0, last) for _ in range(calibration.samples)]
    return torch.tensor([ids[begin : begin + calibration.length] for begin in begins])


def _check_installed() -> None:
    try:
        import llmcompressor  # noqa: F401
    except ImportError as e:
        raise ValueError(
            f"GPTQ is done by the package llmcompressor, which cannot be imported ({e}): pip install --no-deps "
            f"{PACKAGES}; without --calibration-data weights are rounded to nearest"
        ) from e
