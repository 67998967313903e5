"""Positions and places of images against the functions of transformers, for random grids; rotary angles likewise."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.backends.megatron_utils.model.images import (
    MultimodalRotaryEmbedding,
    distinct_images,
    images_of,
    num_tokens,
    place_images,
    shared_features,
)
from slime.models import hf_fields

IMAGE, START, END = 250, 252, 253
MERGE = 2

grid = st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 5)).map(lambda g: (g[0], 2 * g[1], 2 * g[2]))
part = st.tuples(st.integers(0, 6), grid)
sample = st.tuples(st.lists(part, max_size=3), st.integers(1, 6))
"""Text before each image, and after the last."""


def tokens_of(parts: list[tuple[int, tuple[int, int, int]]], rest: int) -> torch.Tensor:
    ids = []
    for before, shape in parts:
        ids += [*range(before), START, *[IMAGE] * (shape[0] * shape[1] * shape[2] // MERGE**2), END]
    return torch.tensor([*ids, *range(rest)])


def theirs(family: Any, tokens: torch.Tensor, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """Return the positions [3, t] that the model class ``family`` of transformers gives one sample."""
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=4)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = family.get_vision_position_ids.__get__(model)
    positions, _ = family.get_rope_index(
        model,
        tokens[None],
        mm_token_type_ids=(tokens == IMAGE).int()[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    return positions[:, 0]


@settings(max_examples=60, deadline=None)
@given(st.lists(sample, min_size=1, max_size=4))
def test_positions_are_those_of_transformers(samples: list[Any]) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    tokens = [tokens_of(*parts) for parts in samples]
    grids = [[shape for _, shape in parts] for parts, _ in samples]
    lengths = [len(sequence) for sequence in tokens]
    every = [shape for shapes in grids for shape in shapes]
    positions, features = place_images(torch.cat(tokens), lengths, every, IMAGE, MERGE)
    for family in (Qwen3VLModel, Qwen2_5_VLModel, Qwen3_5Model):
        expected = [theirs(family, sequence, shapes) for sequence, shapes in zip(tokens, grids, strict=True)]
        assert torch.equal(positions, torch.cat(expected, 1))
    is_image = torch.cat(tokens) == IMAGE
    assert features[is_image].tolist() == list(range(sum(num_tokens(shape, MERGE) for shape in every)))
    assert set(features[~is_image].tolist()) <= {-1}


@pytest.mark.parametrize(
    ("tokens", "lengths", "grids", "message"),
    [
        ([1, IMAGE, 2], [3], [], "1 image tokens, but the 0 images have 0 features"),
        ([1, 2], [2], [(1, 2, 2)], "0 image tokens, but the 1 images have 1 features"),
        ([IMAGE, 1, IMAGE], [3], [(1, 2, 4)], r"the 2 image tokens of an image of \[1, 2, 4\] patches are not one run"),
        ([1, IMAGE, IMAGE, 1], [2, 2], [(1, 4, 2)], r"an image of \[1, 4, 2\] patches are not one run"),
    ],
)
def test_tokens_that_are_not_those_of_the_images(tokens: Any, lengths: Any, grids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place_images(torch.tensor(tokens), lengths, grids, IMAGE, MERGE)


def test_neighbors_are_images_of_their_own() -> None:
    positions, features = place_images(torch.tensor([7, *[IMAGE] * 3, 8]), [5], [(1, 2, 2), (1, 4, 2)], IMAGE, MERGE)
    assert positions.tolist() == [[0, 1, 2, 2, 4], [0, 1, 2, 3, 4], [0, 1, 2, 2, 4]]
    assert features.tolist() == [-1, 0, 1, 2, -1]


def test_equal_images_are_found_by_tensor_and_by_value() -> None:
    a, b = torch.rand(24, 3), torch.rand(24, 3)
    nearly = a.clone()
    nearly[-1, -1] += 1e-7
    images = [a, b, a, a.clone(), nearly, b[:], a]
    assert not torch.equal(nearly, a)
    assert distinct_images(images, [(1, 4, 6)] * 7) == ([0, 1, 4], [0, 1, 0, 0, 2, 1, 0])


def test_the_same_patches_of_another_grid_are_another_image() -> None:
    a = torch.rand(24, 3)
    assert distinct_images([a, a, a], [(1, 4, 6), (1, 6, 4), (1, 4, 6)]) == ([0, 1], [0, 1, 0])
    assert distinct_images([], []) == ([], [])


def test_what_is_not_a_number_is_equal_to_its_own_tensor_alone() -> None:
    a = torch.full((4, 3), torch.nan)
    assert distinct_images([a, a.clone(), a], [(1, 2, 2)] * 3) == ([0, 1], [0, 1, 0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), grid), max_size=8))
def test_features_of_distinct_images_are_those_of_all(chosen: list[tuple[int, tuple[int, int, int]]]) -> None:
    """A feature here is the number of its image and its place in that."""
    pixels = [torch.full((g[0] * g[1] * g[2], 1), float(value)) for value, g in chosen]
    grids = [g for _, g in chosen]
    firsts, uses = distinct_images(pixels, grids)
    assert len(firsts) == len(set(chosen))

    def features(images: Any) -> list[Any]:
        return [(value, g, i) for value, g in images for i in range(num_tokens(g, MERGE))]

    shown, rows = shared_features(grids, uses, MERGE)
    assert shown == [chosen[first][1] for first in firsts]
    of_distinct = features([chosen[first] for first in firsts])
    assert [of_distinct[row] for row in rows.tolist()] == features(chosen)


@pytest.mark.parametrize("sections", [(4, 2, 2), (2, 3, 3), (3, 3, 2)])
def test_interleaved_angles_are_those_of_transformers(sections: tuple[int, int, int]) -> None:
    from transformers import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)}
    config = Qwen3VLTextConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rope)
    positions = torch.randint(0, 1000, (3, 9), generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3VLTextRotaryEmbedding(config)(torch.zeros(()), positions[:, None])
    angles = MultimodalRotaryEmbedding(16, 5e6, sections, interleaved=True)(positions)
    assert angles.shape == (9, 1, 1, 16)
    torch.testing.assert_close(angles[:, 0, 0].cos(), cos[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(angles[:, 0, 0].sin(), sin[0], atol=1e-5, rtol=0)


def test_angles_in_blocks_rotate_as_transformers() -> None:
    from transformers import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    config = Qwen2_5_VLTextConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 1000, (3, 9), generator=generator)
    cos, sin = theirs.Qwen2_5_VLRotaryEmbedding(config)(torch.zeros(()), positions[:, None])
    q = torch.randn(1, 4, 9, 16, generator=generator)
    wanted, _ = theirs.apply_multimodal_rotary_pos_emb(q, q, cos, sin, [2, 3, 3])
    angles = MultimodalRotaryEmbedding(16, 1e6, (2, 3, 3), interleaved=False)(positions)[:, 0, 0]
    seen = q * angles.cos() + theirs.rotate_half(q) * angles.sin()
    torch.testing.assert_close(seen, wanted, atol=1e-5, rtol=0)


def test_sections_must_divide_the_rotated_part() -> None:
    with pytest.raises(ValueError, match=r"mrope_section \[4, 2, 2\] does not divide 16 frequencies"):
        MultimodalRotaryEmbedding(32, 1e6, (4, 2, 2), interleaved=True)


VISION = {"patch_size": 16, "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2}
ROPE = {"rope_theta": 5e6, "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}}
QWEN3_VL = {
    "model_type": "qwen3_vl", "image_token_id": 151655, "tie_word_embeddings": False,
    "vision_config": {**VISION, "deepstack_visual_indexes": [8, 16, 24]},
    "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128, "tie_word_embeddings": True, **ROPE},
}  # fmt: skip
QWEN2_5_VL = {  # as published: the text's values are not in a part of their own
    "model_type": "qwen2_5_vl", "image_token_id": 151655, "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"patch_size": 14, "in_chans": 3, "spatial_merge_size": 2, "temporal_patch_size": 2},
}  # fmt: skip


def read(folder: Path, config: dict[str, Any]) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return images_of(Namespace(hf_checkpoint=str(folder)))


def test_facts_of_a_config(tmp_path: Path) -> None:
    found = read(tmp_path, QWEN3_VL)
    assert (found.token, found.merge, found.patch_numbers, found.deepstack) == (151655, 2, 1536, 3)
    assert (found.sections, found.rope_base, found.rotated) == ((24, 20, 20), 5e6, 1.0)
    found = read(tmp_path, QWEN2_5_VL)
    assert (found.token, found.merge, found.patch_numbers, found.deepstack) == (151655, 2, 1176, 0)
    assert (found.sections, found.rope_base) == ((16, 24, 24), 1e6)
    assert hf_fields.text_part(QWEN3_VL)["tie_word_embeddings"] is False


@pytest.mark.parametrize("key", ["vision_config", "image_token_id", "text_config"])
def test_another_model_is_no_vision_language_model(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not that of a vision-language model"):
        read(tmp_path, {name: value for name, value in QWEN3_VL.items() if name != key})
