"""A cluster of stand-in engines, fresh singletons, and arguments that point to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import data_source, eval_rollout, rm_hub, sglang_rollout
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts
from tests.support.standin import StandInCluster


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> CharTokenizer:
    char_tokenizer = CharTokenizer()
    for module in (sglang_rollout, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: char_tokenizer)
    monkeypatch.setattr(rm_hub, "_tokenizer", lambda *_: char_tokenizer)
    return char_tokenizer


@pytest.fixture
def cluster(tokenizer: CharTokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCluster]:
    """Two engines behind a router; the rollout state and the HTTP client are made again for each test."""
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(eval_rollout, "EVAL_PROMPT_DATASET", {})
    with StandInCluster(2) as running:
        yield running
        if http_utils._http_client is not None:
            run(http_utils._http_client.close())
    SingletonMeta.clear_instances()


@pytest.fixture
def make_args(cluster: StandInCluster, tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """Return arguments for the cluster, with ``prompts`` prompts in a file."""

    def make(prompts: int = 12, **overrides: Any) -> SimpleNamespace:
        path = write_prompts(tmp_path / "prompts.jsonl", prompts)
        args = rollout_args(
            prompt_data=str(path), sglang_router_ip=cluster.host, sglang_router_port=cluster.port, **overrides
        )
        http_utils.init_http_client(args)
        return args

    return make
