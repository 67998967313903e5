"""Every algorithm under every layout of the table in docs/en/advanced/layouts.md, up to four ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.layout_table import measure_all
from tests.support.layouts import ALGORITHMS, FLOAT64, FP32, LAYOUTS, assert_equal

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("precision", [FLOAT64, FP32])
def test_layout_does_not_matter(precision: str, tmp_path: Path) -> None:
    results = measure_all(tmp_path, precision, ALGORITHMS)
    failed = []
    for (algorithm, layout), result in results.items():
        try:
            assert_equal(result, results[algorithm, LAYOUTS[layout].reference], precision)
        except AssertionError as error:
            failed.append((algorithm, layout, str(error)))
    assert not failed
