"""Weights and rejection where engine and trainer disagree, by the path of their flag (``--custom-tis-function-path``).

The formulas are in ``slime.algorithms.mis``, with the keys of ``mis.yaml``; this is where one of your own would begin.
"""

from __future__ import annotations

from slime.algorithms.mis import LEVELS, MODES, Settings, compute_mis_weights
from slime.backends.megatron_utils.loss import mis_function as compute_mis_weights_with_cp

__all__ = ["LEVELS", "MODES", "Settings", "compute_mis_weights", "compute_mis_weights_with_cp"]
