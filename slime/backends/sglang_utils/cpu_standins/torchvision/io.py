"""Stand-in for ``torchvision.io``."""

from enum import Enum

from torchvision._missing import missing

decode_jpeg = missing("torchvision.io.decode_jpeg")
decode_image = missing("torchvision.io.decode_image")


class ImageReadMode(Enum):
    """Same members as torchvision's: they are used as default arguments."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4
