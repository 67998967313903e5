"""The long form of ``tests/integration/test_cpu_engine.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cpu_engine import pair_of_engines, run_crowd

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pool", [3000, 65536], ids=["full pool", "room for all"])
def test_crowds_of_many_sizes(tmp_path: Path, pool: int) -> None:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2}
    with pair_of_engines(tmp_path, sizes, sglang_max_total_tokens=pool) as pair:
        for seed in range(6):
            print(run_crowd(pair, seed=seed, requests=150, longest=(60, 400)[seed % 2], seconds=30.0, events=40))
