"""Vision-language models: megatron's GPTModel behind a vision tower of transformers. After ``import_megatron()``.

The tower is on the first pipeline stage, whole on every rank. Its features replace the embeddings of image tokens;
those of its inner layers (deepstack, Qwen3-VL) are added to what the first decoder layers return. Every stage needs
tokens and grids for the positions, only the first one pixels.

Without ``--train-vision-tower`` the tower is not part of the module tree: it has no parameters, gradients or optimizer
state, and is neither saved nor pushed. With it, its parameters are ``visual.*``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.attention import sequence_lengths, undo_zigzag
from slime.backends.megatron_utils.model.images import (
    Grid,
    Images,
    MultimodalRotaryEmbedding,
    images_of,
    place_images,
    shared_features,
)
from slime.backends.megatron_utils.model.provider import gpt_model, params_dtype
from slime.backends.megatron_utils.weights.maps.vision import TOWER
from slime.backends.megatron_utils.weights.naming import model_family
from slime.batching.context_parallel import slice_with_cp
from slime.utils import accelerator
from slime.utils.image_tokens import FORBIDDEN
from slime.weights.hf.checkpoint import HfCheckpoint, read_config

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from transformers import PreTrainedModel

    from slime.utils.autograd import Context

    class _TowerContext(Context):
        leaves: tuple[Tensor, ...]


def vision_language_model(
    args: Args,
    config: TransformerConfig,
    layer_spec: Callable[[Args, TransformerConfig, int | None], Any],
    tower: type[PreTrainedModel],
    *,
    interleaved: bool,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> torch.nn.Module:
    """Return one stage: layers of ``layer_spec``, on the first one behind a ``tower`` (a model class of transformers).

    ``interleaved``: see ``MultimodalRotaryEmbedding``. Raises ValueError for what such a model cannot do.
    """
    images = images_of(args)
    if args.mtp_num_layers:
        raise ValueError("--mtp-num-layers: MTP layers of vision-language models are not supported; leave it out")
    config.apply_rope_fusion = False  # the kernel looks positions up in a table that all sequences share
    model: Any = gpt_model(
        args,
        config,
        layer_spec(args, config, vp_stage),
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        model_class=partial(
            VisionLanguageModel,
            images=images,
            interleaved=interleaved,
            tower=build_tower(args, tower) if pre_process else None,
            trains_tower=args.train_vision_tower,
            forbids=args.multimodal_keys is not None and args.loss_type != "sft_loss",
        ),
    )
    model.logits_may_be_overwritten = True  # see ``provider.model_provider``
    return model


def build_tower(args: Args, tower: type[PreTrainedModel]) -> torch.nn.Module:
    """Return the tower of ``--hf-checkpoint`` on the device, with its weights unless it is to be trained.

    A trained one gets them with the model's: from the checkpoint that this is loaded from. Full recomputation is that
    of its blocks, too.
    """
    assert tower.config_class is not None
    vision_config = tower.config_class.from_dict(read_config(args.hf_checkpoint)["vision_config"])
    with torch.device(accelerator.current_device()):
        built = tower(vision_config)
    for parameter in built.parameters():  # not its buffers, the frequencies of its rotary embedding
        parameter.data = parameter.data.to(params_dtype(args))
    if args.train_vision_tower:
        if args.recompute_granularity == "full":
            built.gradient_checkpointing_enable({"use_reentrant": False})
        return built
    built.requires_grad_(False)
    load_tower(args, built)
    return built.eval()


@torch.no_grad()
def load_tower(args: Args, tower: torch.nn.Module) -> None:
    """Give ``tower`` the weights of ``--hf-checkpoint``."""
    family = model_family(args, args.hf_checkpoint)
    with HfCheckpoint(args.hf_checkpoint) as checkpoint:
        for name, parameter in tower.named_parameters():
            rule, place = family.find(TOWER + name)
            (source,) = rule.hf_names(None, None, place.block)
            parameter.copy_(checkpoint.tensor(source))


class VisionLanguageModel(GPTModel):
    """One stage of megatron's GPTModel that takes images; see the module's docstring."""

    def __init__(
        self,
        *,
        config: TransformerConfig,
        images: Images,
        interleaved: bool,
        tower: torch.nn.Module | None,
        trains_tower: bool,
        forbids: bool,
        **keywords: Any,
    ) -> None:
        super().__init__(config=config, **keywords)
        self.images, self.trains_tower, self.forbids = images, trains_tower, forbids
        self.takes_pixels = tower is not None
        self.position_embedding_type, self.mrope_section = "mrope", list(images.sections)
        self.rotary_pos_emb = MultimodalRotaryEmbedding(
            int(config.kv_channels * images.rotated), images.rope_base, images.sections, interleaved=interleaved
        )
        if trains_tower and tower is not None:
            self.visual = tower
        object.__setattr__(self, "tower", tower)  # not a child: a frozen tower is not part of the model
        if tower is None or not images.deepstack:
            return
        if len(self.decoder.layers) < images.deepstack:
            raise ValueError(
                f"the first pipeline stage has {len(self.decoder.layers)} layers, and features of the vision tower "
                f"enter the first {images.deepstack}"
            )
        for number, layer in enumerate(self.decoder.layers[: images.deepstack]):
            layer.register_forward_hook(partial(_add_features, number), with_kwargs=True)

    def load_tower(self, args: Args) -> bool:
        """Give this stage's tower the weights of ``--hf-checkpoint``; return whether it has one."""
        if self.tower is not None:
            load_tower(args, self.tower)
        return self.tower is not None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        image_uses: Tensor | None = None,
        **keywords: Any,
    ) -> Tensor:
        """Return the logits [1, t, vocab_local] of packed sequences, on other stages than the last hidden states.

        ``pixel_values`` [patches, numbers of a patch] and ``image_grid_thw`` [images, 3] are those of all sequences,
        in their order; None without images. With ``image_uses`` [images] the pixels are those of distinct images,
        and it has the place among them of each image. ``position_ids`` are not read. Raises ValueError if image tokens
        and images differ.
        """
        if packed_seq_params is None:
            raise ValueError(f"{type(self).__name__} takes packed sequences only, and got none")
        lengths = sequence_lengths(packed_seq_params)
        grids = [] if image_grid_thw is None else image_grid_thw.tolist()
        tokens = whole_pack(input_ids[0], lengths)
        positions, features = place_images(tokens, lengths, grids, self.images.token, self.images.merge)
        if self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=None)
            if image_uses is not None:
                grids, rows = shared_features(grids, image_uses.tolist(), self.images.merge)
                features = torch.cat([rows, torch.tensor([-1])])[features]  # -1: text
            found = self._features(pixel_values, grids)
            if found is not None:
                own = self._own_rows(features.to(input_ids.device), lengths)
                decoder_input = self._replaced(decoder_input, found, own, packed_seq_params)
        output = super().forward(
            input_ids,
            positions.to(input_ids.device),
            attention_mask,
            decoder_input=decoder_input,
            packed_seq_params=packed_seq_params,
            **keywords,
        )
        if self.post_process and self.forbids:
            self._forbid_placeholders(output, tokens, lengths)
        return output

    @torch.no_grad()
    def _forbid_placeholders(self, logits: Tensor, tokens: Tensor, lengths: list[int]) -> None:
        """Take placeholders out of the distributions [1, t, vocab_local], in place, as engines do that sample.

        But where the next token is one, which was not sampled: its log-prob has to stay a usual number. Adding a
        constant changes no gradient, so autograd is not to know (`data`).
        """
        width, rank = logits.size(-1), mpu.get_tensor_model_parallel_rank()
        if width * mpu.get_tensor_model_parallel_world_size() != self.vocab_size:
            return  # a critic's values
        is_next = torch.isin(tokens, torch.tensor(self.images.placeholders, device=tokens.device)).roll(-1)
        penalty = self._own_rows(torch.where(is_next, 0.0, FORBIDDEN), lengths).to(logits.dtype)
        for placeholder in self.images.placeholders:
            if rank * width <= placeholder < (rank + 1) * width:
                logits.data[0, :, placeholder - rank * width] += penalty

    def _features(self, pixels: Tensor | None, grids: Sequence[Grid]) -> tuple[Tensor, ...] | None:
        """Return the features [n, hidden] for the embeddings, and those for each of the first layers; None without.

        A tower in training always runs, if only on one patch of an image that is nowhere: with overlapped reduction
        Megatron waits for the gradient of each of its weights in every micro-batch.
        """
        trains = self.trains_tower and torch.is_grad_enabled()
        if not grids:
            if not trains:
                return None
            side = self.images.merge
            grids, pixels = [(1, side, side)], torch.zeros(side * side, self.images.patch_numbers)
        if pixels is None:
            raise ValueError(f"there are {len(grids)} images, but no pixel_values")
        weight = next(self.tower.parameters())
        with torch.set_grad_enabled(trains):
            shapes = torch.tensor(grids, device=weight.device)
            output = self.tower(pixels.to(weight.device, weight.dtype), grid_thw=shapes)
        return output.pooler_output, *(getattr(output, "deepstack_features", None) or ())

    def _own_rows(self, features: Tensor, lengths: list[int]) -> Tensor:
        """Return the entries of ``features`` [t], of the pack, for this context-parallel rank's tokens."""
        rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        return torch.cat([slice_with_cp(part, cp_rank=rank, cp_size=size) for part in features.split(lengths)])

    def _replaced(
        self, embeddings: Tensor, found: tuple[Tensor, ...], own: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        """Return ``embeddings`` [t, 1, hidden] with features at image tokens; what layers add waits with the pack.

        Recomputation runs the layers again, and pipeline stages begin micro-batches before others end: so features
        belong to a pack, and those that layers add are leaves, whose gradients pass through the tower once.
        """
        leaves = tuple(feature.detach().requires_grad_(feature.requires_grad) for feature in found[1:])
        first = _OneBackward.apply(leaves, *found) if found[0].requires_grad else found[0]
        is_text = (own < 0)[:, None, None]
        if self.config.sequence_parallel:
            group = mpu.get_tensor_model_parallel_group()
            is_text = is_text.chunk(group.size())[group.rank()]
        setattr(packed_seq_params, "_deepstack", [(leaf, own) for leaf in leaves])  # noqa: B010  (megatron's dataclass)
        return embeddings * is_text.to(embeddings.dtype) + spread(first, own, embeddings.dtype, self.config)


class _OneBackward(torch.autograd.Function):
    """The first of the features; its backward pass, the last of a pack's, gives the others what the layers left."""

    @staticmethod
    def forward(ctx: _TowerContext, leaves: tuple[Tensor, ...], *found: Tensor) -> Tensor:
        ctx.leaves = leaves
        return found[0].view_as(found[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _TowerContext, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in ctx.leaves]
        return None, gradients[0], *left


def spread(features: Tensor, own: Tensor, dtype: torch.dtype, config: TransformerConfig) -> Tensor:
    """Return [t, 1, hidden]: the feature of each of this rank's tokens, zeros at text; ``own`` [t] numbers them."""
    features = features.to(dtype)
    rows = torch.cat([features, features.new_zeros(1, features.size(1))])[own].unsqueeze(1)  # -1: the zeros
    return scatter_to_sequence_parallel_region(rows) if config.sequence_parallel else rows


def _add_features(
    number: int, layer: TransformerLayer, inputs: object, keywords: dict[str, Any], output: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Add the features for decoder layer ``number`` to its output (hidden states, context)."""
    waiting = getattr(keywords["packed_seq_params"], "_deepstack", None)
    if waiting is None:
        return output
    hidden, *rest = output
    leaf, own = waiting[number]
    return (hidden + spread(leaf, own, hidden.dtype, layer.config), *rest)


def whole_pack(tokens: Tensor, lengths: list[int]) -> Tensor:
    """Return the tokens [t] of the pack from this context-parallel rank's part of every sequence."""
    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return tokens
    parts = [torch.empty_like(tokens) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tokens.contiguous(), group=group)
    local = [length // group.size() for length in lengths]
    ranks = [part.split(local) for part in parts]
    return torch.cat([undo_zigzag(sequence) for sequence in zip(*ranks, strict=True)])
