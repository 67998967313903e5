"""Pieces of tensors: what is packed and where it goes is what ``copy_`` between two views does."""

from __future__ import annotations

import json
import random

import pytest
import torch

from slime.weights.p2p.plan import Piece


def random_view(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Cut, step, transpose and select, at random."""
    for _ in range(draw.randrange(5)):
        if not tensor.dim():
            break
        dim = draw.randrange(tensor.dim())
        kind = draw.choice(("narrow", "step", "transpose", "select"))
        if kind == "narrow":
            start = draw.randrange(tensor.shape[dim])
            tensor = tensor.narrow(dim, start, draw.randrange(1, tensor.shape[dim] - start + 1))
        elif kind == "step":
            tensor = tensor.movedim(dim, 0)[:: draw.choice((1, 2))].movedim(0, dim)
        elif kind == "transpose":
            tensor = tensor.transpose(dim, draw.randrange(tensor.dim()))
        else:
            tensor = tensor.select(dim, draw.randrange(tensor.shape[dim]))
    return tensor


@pytest.mark.parametrize("seed", range(150))
def test_a_piece_does_what_a_copy_between_views_does(seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 5))]
    memory, dtype = torch.zeros(shape, dtype=torch.bfloat16), torch.bfloat16
    target = random_view(draw, memory)
    # A tensor with as many elements, of which a view of the target's shape is copied; some dimensions are expanded.
    wanted = [1 if draw.random() < 0.2 else size for size in target.shape]
    tensor = torch.randn([size + draw.randrange(3) for size in wanted])
    source = tensor
    for dim, size in enumerate(wanted):
        source = source.narrow(dim, draw.randrange(source.shape[dim] - size + 1), size)

    piece = Piece.of_copy(3, "p", target, source)
    piece = Piece.of_json(json.loads(json.dumps(piece)))
    packed = piece.pack(tensor, dtype)
    written, position = bytearray(memory.nbytes), 0
    for place, nbytes in piece.runs(dtype.itemsize):
        written[place : place + nbytes] = packed[position : position + nbytes].numpy().tobytes()
        position += nbytes
    assert position == packed.numel() == target.numel() * 2
    target.copy_(source)
    assert bytes(written) == memory.view(torch.uint8).numpy().tobytes()
    assert torch.equal(piece.unpack(memory), packed)


def test_what_lies_together_is_one_run() -> None:
    memory, tensor = torch.zeros(4, 6, 8), torch.zeros(6, 8)
    rows = Piece.of_copy(0, "w", memory[1].narrow(0, 2, 3), tensor.narrow(0, 0, 3))
    assert rows == Piece(0, "w", (24,), (1,), 0, (1,), 64)
    assert list(rows.runs(4)) == [(256, 96)]
    columns = Piece.of_copy(0, "w", memory[0].narrow(1, 4, 4), tensor.narrow(1, 0, 4))
    assert (columns.shape, columns.target, columns.source) == ((6, 4), (8, 1), (8, 1))
    assert list(columns.runs(4)) == [(16 + 32 * row, 16) for row in range(6)]
    one = Piece.of_copy(0, "w", memory[0, 0, 3], tensor[5, 7])
    assert (one.shape, list(one.runs(4))) == ((), [(12, 4)])


def test_a_tensor_that_is_part_of_another_is_packed_from_where_it_is() -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    piece = Piece.of_copy(0, "w", torch.zeros(2, 6), torch.zeros(3, 6)[1:])
    assert piece.pack(whole[1:], torch.float32).view(torch.float32).tolist() == list(range(12, 24))
    transposed = torch.arange(18.0).reshape(6, 3).t()
    assert torch.equal(piece.pack(transposed, torch.float32).view(torch.float32), transposed[1:].flatten())
