"""Make the data of the small version: the quickstart's.

python -m examples.delta_weight_sync.make_data --out data --seed 0
"""

from __future__ import annotations

from examples.quickstart.make_data import main, make_data

__all__ = ["make_data"]

if __name__ == "__main__":
    main()
