"""Every algorithm under every layout of the table in docs/en/advanced/layouts.md, up to four ranks; fp32 for GRPO."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layout_table import measure_all
from tests.support.layouts import ALGORITHMS, FLOAT64, FP32, LAYOUTS, assert_equal

pytestmark = pytest.mark.soak


CASES = [*((FLOAT64, algorithm) for algorithm in ALGORITHMS), (FP32, "grpo")]  # about 10 minutes each


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(("precision", "algorithm"), CASES)
def test_layout_does_not_matter(precision: str, algorithm: str, tmp_path: Path) -> None:
    results = measure_all(tmp_path, precision, [algorithm])
    failed = []
    for (_, layout), result in results.items():
        try:
            assert_equal(result, results[algorithm, LAYOUTS[layout].reference], precision)
        except AssertionError as error:
            failed.append((layout, str(error)))
    assert not failed
