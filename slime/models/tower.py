"""The vision tower of Qwen's vision-language models: its tensors, what it keeps for a backward pass, and its FLOPs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_FIELDS = ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size", "patch_size")


@dataclass(frozen=True)
class Tower:
    """Sizes of a tower. ``merge``: a token is ``merge`` x ``merge`` patches; ``window``: patches in a row of a window.

    ``gated``: the layers of Qwen2.5-VL, with RMSNorm, gates and windows; ``whole_layers`` of them see whole images.
    ``positions`` are the rows of a learned position embedding. ``deepstack`` counts the inner layers whose features
    enter decoder layers.
    """

    depth: int
    hidden: int
    ffn: int
    heads: int
    out: int
    patch_numbers: int
    merge: int
    positions: int = 0
    deepstack: int = 0
    gated: bool = False
    whole_layers: int = 0
    window: int = 0

    @property
    def merged(self) -> int:
        """Numbers of the patches of a token."""
        return self.hidden * self.merge**2

    def tensors(self) -> list[tuple[int, int]]:
        """Return (elements, how many) of the parameters."""
        h, out, merged, norm = self.hidden, self.out, self.merged, 1 if self.gated else 2
        linears = [(h, 3 * h), (h, h), *[(h, self.ffn)] * (2 if self.gated else 1), (self.ffn, h)]
        found = [(self.patch_numbers * h, 1), (h, norm * 2 * self.depth)]
        found += [(self.positions * h, 1)] if self.positions else []
        found += [] if self.gated else [(h, 1)]  # the bias of the patches' embedding
        for inputs, outputs in linears:
            found += [(inputs * outputs, self.depth), (outputs, self.depth)]
        for norm_size, mergers in ((h, 1), (merged, self.deepstack)):
            found += [(norm_size, norm * mergers), (merged * merged, mergers), (merged, mergers)]
            found += [(merged * out, mergers), (out, mergers)]
        return [(numel, count) for numel, count in found if count]

    @property
    def parameters(self) -> int:
        """Return how many numbers are trained or held."""
        return sum(numel * count for numel, count in self.tensors())

    def layer_bytes(self, element: int) -> int:
        """Return what a layer keeps per patch for its backward pass.

        Input and output of two norms, queries, keys and values, the rotated queries and keys, the output of the
        attention and a copy of it, and the MLP's; RMSNorm keeps its input in fp32, and the numbers that are scaled.
        """
        if self.gated:
            return element * (11 * self.hidden + 4 * self.ffn) + 8 * self.hidden + 4 * self.heads + 8
        return element * (11 * self.hidden + 2 * self.ffn) + 4 * self.heads + 16

    def kept_bytes(self, element: int, *, recomputed: bool) -> int:
        """Return what the tower keeps per patch for its backward pass, of layers that are recomputed their input."""
        layers = self.depth * (element * self.hidden if recomputed else self.layer_bytes(element))
        mergers = element * self.hidden * (4 + 3 * self.deepstack) + 4 * self.hidden * self.gated
        rotary = 8 * (self.hidden // self.heads)  # sines and cosines
        return layers + mergers + rotary + element * self.patch_numbers

    def forward_flops(self, grids: Iterable[Sequence[int]]) -> float:
        """Return the FLOPs of matrix products for images of ``grids`` patches, in time, height and width.

        Attention is that of all patches of a moment with each other, in windows where the layer has them.
        """
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        per_patch = self.patch_numbers * self.hidden + self.depth * (4 * self.hidden**2 + mlp)
        per_token = (1 + self.deepstack) * (self.merged**2 + self.merged * self.out)
        total = 0.0
        for time, height, width in grids:
            patches, moment = time * height * width, height * width
            pairs = self.depth * moment**2
            if self.window:
                windows = (
                    (self.depth - self.whole_layers) * _squares(height, self.window) * _squares(width, self.window)
                )
                pairs = self.whole_layers * moment**2 + windows
            total += patches * per_patch + patches / self.merge**2 * per_token + 2 * time * pairs * self.hidden
        return 2 * total


def _squares(side: int, window: int) -> int:
    """Return the sum of the squares of the parts of ``side``."""
    whole, rest = divmod(side, window)
    return whole * window**2 + rest**2


def tower_of(config: Mapping[str, Any]) -> Tower | None:
    """Return the tower of a model with this config; None where it says too little."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping) or not all(vision.get(field) for field in _FIELDS):
        return None
    whole, positions = vision.get("fullatt_block_indexes"), vision.get("num_position_embeddings")
    if whole is None and not positions:
        return None
    merge, side = int(vision.get("spatial_merge_size", 2)), int(vision["patch_size"])
    channels = int(vision.get("in_channels", vision.get("in_chans", 3)))
    return Tower(
        depth=int(vision["depth"]),
        hidden=int(vision["hidden_size"]),
        ffn=int(vision["intermediate_size"]),
        heads=int(vision["num_heads"]),
        out=int(vision["out_hidden_size"]),
        patch_numbers=channels * int(vision.get("temporal_patch_size", 2)) * side**2,
        merge=merge,
        positions=0 if whole is not None else int(positions or 0),
        deepstack=len(vision.get("deepstack_visual_indexes") or ()) if whole is None else 0,
        gated=whole is not None,
        whole_layers=len(whole or ()),
        window=int(vision.get("window_size", 112)) // side // merge * merge if whole is not None else 0,
    )
