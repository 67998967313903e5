"""The architecture that mbridge sees in a config, in the words of the table of models.

``python -m slime.backends.megatron_utils.model.from_mbridge < config.json`` writes the answer as one line of JSON:
``{"megatron": section}`` or ``{"problem": phrase}``, see ``slime.models.bridges``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from typing import Any

from slime.arguments.args import Args
from slime.arguments.command_line import flags_by_option
from slime.arguments.rules.model_defaults import fill
from slime.backends.megatron_utils.model.provider import rope_settings, transformer_config_from_args
from slime.backends.megatron_utils.weights.maps.bridged import bridge_of, bridged_family
from slime.models.megatron_flags import describe

# mbridge 0.15 leaves the weights of Mixtral's experts as a softmax over all of them has them; in transformers and in
# SGLang those of the experts that a token takes add up to 1.
CORRECTED: dict[str, dict[str, Any]] = {"mixtral": {"moe_router_pre_softmax": False}}
NOT_THE_MODEL = re.compile(
    r"parallel_size$|_dtype$|bf16|fp16|fusion|overlap|dropout|init_method|p2p_comm|_grouped_gemm|variable_seq_lengths|"
    r"use_cpu_initialization|persist_layer_norm|deallocate_|masked_softmax|_aux_loss_coeff|load_balancing_type|"
    r"bias_update_rate|dispatcher|_batch_|recompute|cuda_graph|attention_backend|cp_comm_type|deterministic|_offload|"
    r"softmax_in_fp32|loss_scaling"
)
"""Fields of TransformerConfig about precision, parallelism, kernels, initial values and losses."""
OVERRIDDEN = ("_get_transformer_layer_spec", "_model_provider", "get_model")


class CannotBeSaidError(ValueError):
    """The model is one that Megatron's flags do not describe; the message is a phrase."""


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return the ``megatron`` section of the family of ``config``.

    Raises CannotBeSaidError where the model built from it, or its weights, would not be those of mbridge.
    """
    bridge = bridge_of(config)
    from mbridge.core import LLMBridge
    from megatron.core.transformer.transformer_config import TransformerConfig

    kind = type(bridge)
    own = [name for name in OVERRIDDEN if getattr(kind, name, None) is not getattr(LLMBridge, name)]
    if own or kind.TransformerConfigClass is not TransformerConfig:
        made = ", ".join(own) or kind.TransformerConfigClass.__name__
        raise CannotBeSaidError(f"{kind.__name__} of mbridge builds the model itself ({made})")
    wanted = {**vars(bridge.config), **CORRECTED.get(config["model_type"], {})}
    section: dict[str, Any] = {
        "bridge": kind.__name__,
        "qk_layernorm": wanted["qk_layernorm"],
        "qkv_bias": wanted["add_qkv_bias"],
        "router": wanted["moe_router_score_function"],
    }
    # Further flags with the names of the fields; what config.json decides is not decided again.
    decided = {flag.option for flag in describe({**config, "megatron": section}).flags}
    flags = {flag.dest: option for option, flag in flags_by_option().items() if option not in decided}
    run: list[Any] = []
    for name, (_, value) in _differences(_args(config, section), wanted).items():
        if name in flags and isinstance(value, bool | int | float) and value is not False:
            run += [flags[name]] if value is True else [flags[name], value]
    section["run"] = run
    args = _args(config, section)
    if left := _differences(args, wanted):
        phrases = (f"{name} is {value} in mbridge and {seen} by the flags" for name, (seen, value) in left.items())
        raise CannotBeSaidError("; ".join(phrases))
    _check_ends(args, bridge)
    bridged_family(config["model_type"])
    return section


def _args(config: dict[str, Any], section: dict[str, Any]) -> Args:
    """Return the arguments of a run of which the checkpoint's flags are all that is given."""
    args = Args(**{flag.dest: flag.default for flag in flags_by_option().values()})
    fill(args, {**config, "megatron": section}, ())
    return args


def _differences(args: Args, wanted: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (value by the flags, value of mbridge) of the fields that make another model."""
    built = transformer_config_from_args(args)
    found = {}
    for field in dataclasses.fields(built):
        name = field.name
        if NOT_THE_MODEL.search(name):
            continue
        seen, value = (_in_one_form(name, one, args) for one in (getattr(built, name), wanted.get(name)))
        if seen != value:
            found[name] = (seen, value)
    return found


def _in_one_form(name: str, value: Any, args: Args) -> Any:
    if name == "moe_layer_freq" and value == 1:
        return [1] * args.num_layers
    return value or None if name.startswith("moe_shared_expert") else value


def _check_ends(args: Args, bridge: Any) -> None:
    """Compare embedding, positions and output layer, which are arguments of GPTModel."""
    from megatron.core.models.gpt import GPTModel

    built = {
        "vocab_size": args.vocab_size,
        "position_embedding_type": args.position_embedding_type,
        **rope_settings(args),
    }
    defaults = {name: one.default for name, one in inspect.signature(GPTModel.__init__).parameters.items()}
    given = bridge._get_gptmodel_args()
    if unknown := set(given) - set(built) - {"max_sequence_length"}:
        raise CannotBeSaidError(f"mbridge gives GPTModel {', '.join(sorted(unknown))}, for which there are no flags")
    tied = {"tie_word_embeddings": bool(getattr(bridge.hf_config, "tie_word_embeddings", False))}
    built["tie_word_embeddings"] = not args.untie_embeddings_and_output_weights
    for name, value in {**{name: defaults.get(name) for name in built}, **given, **tied}.items():
        if name in built and built[name] != value and (name != "rope_scaling_factor" or built["rope_scaling"]):
            raise CannotBeSaidError(f"{name} is {value} in mbridge and {built[name]} by the flags")


def main() -> int:
    """Answer the one question on the standard input."""
    config = json.load(sys.stdin)
    try:
        answer: dict[str, Any] = {"megatron": settings(config)}
    except ValueError as error:
        answer = {"problem": str(error)}
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
