"""Parts that runs may use and that slime itself does not import."""

import slime  # noqa: F401  makes old paths importable, here too
