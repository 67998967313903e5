"""Stand-in for ``torchvision.transforms.functional``: every function imports and raises when called."""

from torchvision._missing import module_getattr
from torchvision.transforms import InterpolationMode

__all__ = ["InterpolationMode"]
__getattr__ = module_getattr(__name__)
