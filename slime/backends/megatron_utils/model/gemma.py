"""The layers of Gemma 3 and 4, whose attention differs from layer to layer. Import after ``import_megatron()``.

Of Gemma 4 the dense models and 26B-A4B. See ``slime.models.layer_attention``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor
from torch.nn import functional as F

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.gemma_experts import put_experts_beside
from slime.backends.megatron_utils.model.layer_specs import PostNormTransformerLayer, decoder_block_spec
from slime.backends.megatron_utils.model.provider import gpt_model
from slime.models.layer_attention import LayerAttention, Rotary, config_and_layers, shared_heads

if TYPE_CHECKING:
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig


@functools.lru_cache(maxsize=4)  # every layer of a kind asks for the same
def rotary_angles(rotary: Rotary, head_dim: int, length: int, device: torch.device) -> Tensor:
    """Return the angles of positions ``0 .. length - 1``, float32 ``[length, 1, 1, head_dim]``, both halves alike."""
    exponents = torch.arange(0, 2 * rotary.turning, 2, device=device).float() / head_dim
    frequencies = F.pad(1.0 / rotary.base**exponents, (0, head_dim // 2 - rotary.turning)) / rotary.factor
    angles = torch.arange(length, device=device).float()[:, None] * frequencies
    return torch.cat([angles, angles], -1)[:, None, None]


class LayerSelfAttention(SelfAttention):
    """Megatron's self-attention with the heads, the window and the rotary frequencies of its layer.

    ``normalize_values``: over the channels of a head, without a weight.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        *args: object,
        layers: tuple[LayerAttention, ...],
        scale: float,
        normalize_values: bool,
        **kwargs: object,
    ) -> None:
        self_config, own = copy.copy(config), layers[layer_number - 1]
        self_config.kv_channels, self_config.num_query_groups = own.head_dim, own.groups
        self_config.softmax_scale = scale
        self_config.window_size = None if own.window is None else (own.window - 1, 0)
        self_config.window_attn_skip_freq = None
        if own.keys_are_values:
            submodules = copy.copy(submodules)
            submodules.linear_qkv = _narrower(submodules.linear_qkv, own.groups * own.head_dim)
        super().__init__(self_config, submodules, layer_number, *args, **kwargs)
        self.own, self.normalize_values = own, normalize_values
        if own.keys_are_values:  # another name, as weights are found by it
            self.linear_qk = self.linear_qkv
            del self.linear_qkv

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Return what the base class does, with other rotary angles than those of the model."""
        given = kwargs.pop("rotary_pos_emb")
        assert self.own.rotary is not None
        angles = rotary_angles(self.own.rotary, self.own.head_dim, given.size(0), given.device)
        return super().forward(hidden_states, attention_mask, rotary_pos_emb=(angles, angles), **kwargs)

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries ``[s, b, n, d]``, keys and values ``[s, b, g, d]`` of this rank."""
        if self.own.keys_are_values:
            query, key, value = self._query_key_key(hidden_states)
        else:
            query, key, value = super().get_query_key_value_tensors(hidden_states, *args, **kwargs)
        if self.normalize_values:
            value = F.rms_norm(value, (self.own.head_dim,), eps=self.config.layernorm_epsilon)
        return query, key, value

    def _query_key_key(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, _ = self.linear_qk(hidden_states)
        dim, groups = self.own.head_dim, self.own.groups
        shared_by = self.world_size // groups
        if shared_by > 1:  # ranks have parts of a group: as in the base class
            rank = self.tp_group.rank()
            mixed = all_gather_last_dim_from_tensor_parallel_region(mixed).chunk(groups, -1)[rank // shared_by]
        mixed = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, key = mixed.split([mixed.size(-1) - dim, dim], -1)
        query = query.reshape(*query.shape[:2], -1, dim)
        if shared_by > 1:
            query = query.chunk(shared_by, 2)[rank % shared_by]
        return self.q_layernorm(query), self.k_layernorm(key), key


def _narrower(linear: Callable[..., torch.nn.Module], rows: int) -> Callable[..., torch.nn.Module]:
    """Return the builder of a linear layer with so many outputs less than it is asked for."""

    def build(inputs: int, outputs: int, **kwargs: object) -> torch.nn.Module:
        return linear(inputs, outputs - rows, **kwargs)

    return build


class ScaledTransformerLayer(PostNormTransformerLayer):
    """A layer whose output is multiplied by a number of the checkpoint, which is not trained."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.register_buffer("layer_scalar", torch.ones(1, dtype=config.params_dtype))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Return hidden states ``[s, b, hidden]``, and the context of cross attention (None)."""
        output, context = super().forward(*args, **kwargs)
        return output * self.layer_scalar, context


def gemma_model(
    args: Args,
    config: TransformerConfig,
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    generation: int,
) -> torch.nn.Module:
    """Return one stage of Gemma ``generation`` (3 or 4) as ``config.json`` of ``--hf-checkpoint`` describes it.

    Its logits are those before ``final_logit_softcapping``, which is applied where log-probs are taken. Raises
    ValueError for a checkpoint of another number of layers, and for what is not built (``not_built``).
    """
    found, layers = config_and_layers(args.hf_checkpoint, config.num_layers)
    config.activation_func, config.bias_activation_fusion = functools.partial(F.gelu, approximate="tanh"), False
    config.shared_heads = shared_heads(layers)
    config.hetereogenous_dist_checkpoint = any(config.shared_heads)  # Megatron's word: layers are not stacked
    block = decoder_block_spec(args, config, vp_stage)
    scale = 1.0 if generation == 4 else found["query_pre_attn_scalar"] ** -0.5
    attention = {"layers": layers, "scale": scale, "normalize_values": generation == 4}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    for i, layer in enumerate(block.layer_specs):
        layer = block.layer_specs[i] = copy.deepcopy(layer)
        spec = layer.submodules.self_attention
        spec.module, spec.params = LayerSelfAttention, {**spec.params, **attention}
        if layers[first + i].keys_are_values:  # in checkpoints, the norm's name goes with that of the projection
            names = layer.submodules.sharded_state_dict_keys_map
            layer.submodules.sharded_state_dict_keys_map = {
                own: stored.replace("linear_qkv.", "linear_qk.") for own, stored in names.items()
            }
        if generation == 4:
            layer.module = ScaledTransformerLayer
        if found.get("enable_moe_block"):
            put_experts_beside(layer, block.layer_norm)
    model: Any = gpt_model(args, config, block, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if pre_process:
        # In the type of the weights, in which transformers rounds the factor.
        factor = float(torch.tensor(config.hidden_size**0.5).to(config.params_dtype))
        model.embedding.register_forward_hook(lambda module, inputs, output: output * factor)
    model.logits_may_be_overwritten = True  # see ``provider.model_provider``
    return model
