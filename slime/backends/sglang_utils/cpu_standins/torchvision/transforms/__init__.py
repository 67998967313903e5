"""Stand-in for ``torchvision.transforms``."""

from enum import Enum


class InterpolationMode(Enum):
    """Same members as torchvision's: transformers builds a table of them at import time."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


from torchvision.transforms import functional, v2  # noqa: E402 (both import the class above)

__all__ = ["InterpolationMode", "functional", "v2"]
