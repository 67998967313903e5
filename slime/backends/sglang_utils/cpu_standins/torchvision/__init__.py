"""Stand-in for torchvision in CPU engines: the names that SGLang and transformers import, nothing that works on images."""

from torchvision import io, transforms

__version__ = "0.0.0+slime.standin"
__all__ = ["io", "transforms"]
