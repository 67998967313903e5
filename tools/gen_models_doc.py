"""Write ``docs/en/reference/models.md`` from the table of models: ``python -m tools.gen_models_doc [--check]``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime.models import hf_fields
from slime.models.facts import Model, families, models
from slime.models.megatron_flags import plain
from tools.gen_model_scripts import NUM_LAYERS, ROTARY_BASE, repositories

PAGE = Path(__file__).parents[1] / "docs" / "en" / "reference" / "models.md"
HUB = "https://huggingface.co"
OPENING = """<!-- Written by tools/gen_models_doc.py from slime/models/facts.yaml. -->
# Models

The architecture of a model, which Megatron takes as flags, is read from `config.json` of `--hf-checkpoint`:

```bash
python train.py --hf-checkpoint /models/Qwen3-4B --dry-run
```

Every model flag that is not given gets the checkpoint's value: sizes, attention, norms and their epsilon, rotary
embedding, biases, vocabulary, experts and their router, and `--spec` where a family has layers of its own. The dry run
(section "Model") and the log of a run say in one line which flags were taken. Flags that are given are compared, as
described below. A command line that has `--num-layers`, `--hidden-size` and `--num-attention-heads` describes its model
itself: only the architecture is completed then, and what decides how it is computed (fusions, the dispatcher of
experts) stays Megatron's default.

`--hidden-dropout` and `--attention-dropout` are 0 unless they are given (Megatron's own default is 0.1): neither the
engines nor the passes that take log-probs drop anything.

With `--megatron-config-path` a role whose `load` is a Hugging Face checkpoint of another size gets the model flags of
that checkpoint, where neither the file nor the command line says otherwise.

Each script below defines the flags of a model as the bash array `MODEL_ARGS`, for command lines that say everything:

```bash
source scripts/models/qwen3-4B.sh
python train.py --hf-checkpoint /models/Qwen3-4B "${MODEL_ARGS[@]}" --dry-run
```

All scripts, this page and the checks described below come from one table, `slime/models/facts.yaml`. It is
written in the words of a Hugging Face `config.json`; a new model is one entry there and a run of
`python -m tools.gen_model_scripts` and `python -m tools.gen_models_doc`.

## What is checked

The model flags of every run are compared with `config.json` of `--hf-checkpoint`: sizes, attention, rotary embedding,
norms, vocabulary, experts and their router. All differences are reported at once, each with both values, and the run
stops. Flags that say how something is computed (fusions, dispatchers, padding) are yours to choose.

With `--dry-run` the checkpoint need not be there. The flags are then taken from the published model that the directory
is named after, or compared with it, and the plan says so: `/models/Qwen3-4B`, `Qwen/Qwen3-4B` and `Qwen3-4B-FP8` are
all Qwen/Qwen3-4B. Of a name that is not in the table the plan says that nothing was compared.

Of a family that the table does not know, only the numbers are in the config; activation, norms, biases and router are
for you to describe, and the error lists the numbers to add them to. With a layer specification (`--spec`) or
`--custom-model-provider-path` of your own only the values of the config are compared, not what its family implies; a
command line that describes such a model itself is completed by them alone, too.

## Families

Weights are read from and written to Hugging Face checkpoints by one map per family
(`slime/backends/megatron_utils/weights/maps`), found by `model_type` of `config.json`, or by `--model-name`.

Of every family a tiny random model is compared with transformers on several packed sequences of different lengths, in
fp32 (`tests/integration/test_model_families.py`, `test_megatron_layouts.py`): the logits, the gradient of every weight
and the norm of them all (relative difference at most 1e-5), and every tensor of the export, bit for bit. The last
column is the largest difference of a logit that was measured in any of the layouts named; logits have a standard
deviation of 1.1 to 2.5.
"""
FAMILIES = ["Family", "`model_type`", "Beside Megatron's plain layer", "Layouts", "Largest difference"]
ABOUT_FAMILIES = """
* Gated delta nets are computed in chunks, all sequences of a pack together. Tensor-parallel ranks have a share of the
  key heads each (`linear_num_key_heads`, which their number must divide); context-parallel ranks exchange heads for
  whole sequences, and compute all heads where they cannot divide them. On CUDA the rule is a kernel of
  flash-linear-attention or flash-qla (`--qwen-gdn-backend`) where the package is installed, else operations of torch;
  with these kernels it has not been run yet. Checkpoints have the parameters whole, as transformers has them.
* Windows, heads and rotary frequencies of Gemma's layers are read from `config.json`; `--rotary-base` is that of the
  layers without a window. Megatron has no flag for a gated GeLU: `--swiglu` stands for the gate, and `--spec` chooses
  the activation. The capped logits of Gemma 4 are capped where log-probs, entropies and their gradients are computed: a
  loss of your own gets them from `get_responses` and `get_log_probs_and_entropy`, while `logits` are those before. Of
  vision-language checkpoints the language model is trained. The MLP beside the experts of Gemma 4 26B-A4B is Megatron's
  shared expert (`--moe-shared-expert-intermediate-size`). E2B and E4B (embeddings for every layer, shared keys and
  values) are refused.
* Windows, YaRN and the clamped, gated units of gpt-oss are set by `--spec`, as Gemma's are; no flag of Megatron's is
  needed. Published checkpoints are MXFP4: `python -m tools.convert to-bf16` makes the bf16 that trainers and engines
  load. Without TransformerEngine the sinks (`--softmax-type learnable`) keep attention from flash kernels, and
  expert-tensor-parallel ranks may divide experts with biases; Megatron's own experts need
  `--expert-tensor-parallel-size 1`. Adapters (`--lora-rank`) are those of attention.
* Of Kimi K2.5 (`kimi_k25`) the language model is trained, whose tensors are below `language_model` in its checkpoints;
  published ones are INT4 and are [converted first](../advanced/low_precision.md). transformers has no class for the
  whole model yet: the checks have its language model alone, and no engine on a CPU serves it.
* MiMo-V2-Flash (`mimo_v2_flash`) is refused: the pinned transformers has no class of it to compare layers and results
  with (five layers with a window to one without, heads of another size for values, two rotary bases).
* With experts, tensor parallelism needs sequence parallelism.
* The indexer of [sparse attention](../advanced/sparse_attention.md) is not trained, and every pipeline stage must begin
  with a layer that has one. The MTP layers of these families are not trained: whether they have an indexer of their
  own, or which selection they use, is not said by their configs.
* [Images](../advanced/images.md) are taken by Qwen3-VL, Qwen2.5-VL and, with `--spec slime_plugins.models.qwen3_5_vl
  get_qwen3_5_vl_model_provider`, by the vision-language checkpoints of Qwen3.5, of which otherwise the language model
  alone is built. Their samples have several images of different sizes, one, and none
  (`tests/integration/test_vision_families.py`). With images Qwen3.5's largest difference is 5.0e-5, with experts
  2.8e-5: weights that differ by 1e-7 make 2e-4 in transformers itself.
* Parts that are not trained (vision towers without `--train-vision-tower`, without `--mtp-num-layers` also
  [MTP layers](../advanced/multi_token_prediction.md)) are carried over into an export as they
  are in the checkpoint.
* The norms on latents use `--norm-epsilon`, as SGLang's do; those of transformers have 1e-6 whatever the config says.
* Engines on a CPU serve all of these families but MiMo, whose class transformers lacks, and the vision-language
  checkpoints of Qwen3.5 and Gemma. Some need
  [stand-ins for kernels](../advanced/sglang_engines.md#the-plug-in).
* Trainers load bf16: [published FP8 and INT4 weights are converted first](../advanced/low_precision.md).
"""
SCRIPTS_OPENING = """
Megatron's own linear attention (`--experimental-attention-variant gated_delta_net`) takes no packed sequences either.

## Other families, by mbridge

With the package [mbridge](https://github.com/ISEEKYAN/mbridge) (`pip install 'slime[mbridge]'`) slime also trains the
language models that mbridge has a bridge for and the table above does not list: with mbridge 0.15 that is Mixtral
(`mixtral`). Names of tensors are those of the bridge, and the model flags build the configuration that the bridge
builds; layouts, checkpoints, conversions and pushes are those of every other family. Reading the flags takes some
seconds more. Before anything starts, a run is refused, with the reason,

* where flags and `config.json` do not describe the configuration that mbridge has (precision, parallelism, kernels and
  auxiliary losses apart), or the bridge has layers of its own;
* where the bridge makes a parameter of its tensors in a way that is none of slime's layouts: both are compared on small
  tensors in both directions, for one and two tensor-parallel ranks;
* without mbridge, naming the families that are trained.

Not checked is

* that mbridge is right about a model. Mixtral alone is compared with transformers, as the families above are (DP TP+SP
  PP CP EP, largest difference 4.6e-6), and one setting of mbridge 0.15 is corrected for it: the weights of the experts
  that a token takes add up to 1. Of another family compare the engines with the trainer first: the metric
  `train/train_rollout_logprob_abs_diff` of the first step.
* what `config.json` says and neither mbridge nor the flags read.
* that engines serve the model. On a CPU they serve Mixtral, with the log-probs of transformers to 1e-5, also after a
  push.
* published sizes: there are no scripts, and a dry run needs the checkpoint's `config.json`.

MTP layers, vision towers and models whose code comes with the checkpoint are not taken. LoRA adapters are trained, and
pushed as merged weights.

mbridge is also a second opinion of the maps above: `tests/integration/test_mbridge.py` compares those of eight
`model_type`s with its bridges, names and numbers, for one and two tensor-parallel ranks.

## Scripts

Parameters are those of the language model alone, without MTP layers. The variables are set
before a script is sourced.
"""
VARIANTS = """
## Other checkpoints of the same architecture

These repositories differ from those above only in the values given. Where a script has the variable
`MODEL_ARGS_ROTARY_BASE`, it takes the other base; elsewhere give the flag after `"${MODEL_ARGS[@]}"`: the last one
counts.
"""
DIFFERENCES = """
## Differences from slime <= 0.3.1

* qwen2.5-1.5B has the rotary base of the published model, 1000000 instead of 10000.
* The scripts of GLM-4.5, GLM-4.7 and GLM-5 name the norm epsilon, 1e-5, instead of relying on Megatron's default.
* glm4-32B has 61 layers and 2 query groups as published, instead of 64 and 8.
* glm4.7-30B-A3B has no `--add-qkv-bias`: its attention has no biases.
* kimi-k2 says `--beta-fast 1`, as its config does; Megatron's default is 32.
"""


def render() -> str:
    """The whole page."""
    table = models().values()
    rows = [_row(model) for model in table]
    head = ["Script", "Repositories", "Parameters", "Layers", "Hidden", "Heads", "Experts", "Vocabulary", "Variable"]
    variants = [
        [model.script, _link(name), ", ".join(f"`{key}` {plain(value)}" for key, value in changes.items())]
        for model in table
        for name, changes in model.variants.items()
    ]
    return "".join(
        [
            OPENING,
            "\n",
            _table(FAMILIES, _family_rows()),
            ABOUT_FAMILIES,
            SCRIPTS_OPENING,
            "\n",
            _table(head, rows),
            VARIANTS,
            "\n",
            _table(["Script", "Repository", "Values"], variants),
            DIFFERENCES,
        ]
    )


def _family_rows() -> list[list[str]]:
    """One row per page entry; a family whose config is the `text_config` of another goes by both names."""
    types: dict[tuple[str, ...], list[str]] = {}
    for name, family in families().items():
        if "page" in family:
            below = family.get("below", name.removesuffix("_text"))
            names = [name] if below == name else [below, name]
            types.setdefault(tuple(map(str, family["page"])), []).extend(names)
    return [
        [title, ", ".join(f"`{name}`" for name in names), layers, layouts, difference.replace("e-0", "e-")]
        for (title, layers, layouts, difference), names in types.items()
    ]


def _row(model: Model) -> list[str]:
    config = model.config
    experts = hf_fields.experts(config)
    attention = "latent" if hf_fields.is_latent(config) else f"{config['num_key_value_heads']} groups"
    return [
        f"[{model.script}](../../../scripts/models/{model.script}.sh)",
        (f"{model.about} of " if model.about else "") + ", ".join(map(_link, repositories(model))),
        _parameters(model),
        str(config["num_hidden_layers"]),
        str(config["hidden_size"]),
        f"{config['num_attention_heads']}, {attention}",
        f"{config['num_experts_per_tok']} of {experts[1]}" if experts else "",
        str(config["vocab_size"]),
        _variable(model),
    ]


def _parameters(model: Model) -> str:
    total = model.parameters
    if total is None and not model.local_names:
        total = models()[str(model.like)].parameters
    return f"{plain(total)} B" if total is not None else ""


def _variable(model: Model) -> str:
    if model.script in NUM_LAYERS:
        return "`MODEL_ARGS_NUM_LAYERS`"
    return "`MODEL_ARGS_ROTARY_BASE`" if model.script in ROTARY_BASE else ""


def _link(repository: str) -> str:
    return f"[{repository}]({HUB}/{repository})"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main() -> int:
    """Write the page; with ``--check`` only say (exit status 1) whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write; fail when the page is out of date")
    page = render()
    if not parser.parse_args().check:
        PAGE.write_text(page, encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page:
        return 0
    print(f"{PAGE} does not match the table of models; run `python -m tools.gen_models_doc`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
