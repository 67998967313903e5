"""The arguments of a real command line, engines that answer at once, and the groups of a finished rollout."""

from __future__ import annotations

import json
import os
import shlex
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.rollout import eval_rollout, fully_async_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.plugin_contracts.contract import PREFIX, unknown_names
from tests.support.arguments import CONFIG, dry
from tests.support.standin import StandInCluster, hashed_reply
from tools.tiny_model import make_tokenizer

if wrong := unknown_names():
    raise pytest.UsageError("; ".join(wrong))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory without weights: configuration and tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    make_tokenizer(path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    prompts = [{"input": f"{i} + 1 =", "label": str(i + 1), "metadata": {"source_name": "sums"}} for i in range(8)]
    (path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCluster]:
    """Two stand-in engines behind a router."""
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(eval_rollout, "EVAL_PROMPT_DATASET", {})
    with StandInCluster(2) as running:
        yield running
        fully_async_rollout.stop_global_worker()
        if http_utils._http_client is not None:
            run(http_utils._http_client.close())
    SingletonMeta.clear_instances()


@pytest.fixture
def args(checkpoint: Path, cluster: StandInCluster, tmp_path: Path) -> Namespace:
    """Arguments for a run's hooks: 2 prompts per rollout, 2 samples per prompt, and ``SLIME_CONTRACT_ARGS``."""
    prompts = checkpoint / "prompts.jsonl"
    namespace = dry(
        "--hf-checkpoint", checkpoint, "--prompt-data", prompts, "--input-key", "input", "--label-key", "label",
        "--rm-type", "f1", "--rollout-batch-size", 2, "--n-samples-per-prompt", 2, "--global-batch-size", 4,
        "--num-rollout", 4, "--rollout-max-response-len", 16, "--eval-prompt-data", "sums", prompts,
        "--eval-interval", 1, "--eval-max-response-len", 16, "--save", tmp_path / "save", "--save-interval", 1,
        *shlex.split(os.environ.get(PREFIX + "ARGS", "")),
    )  # fmt: skip
    namespace.sglang_router_ip, namespace.sglang_router_port = cluster.host, cluster.port
    namespace.rollout_num_engines = 2
    namespace.load = namespace.save
    http_utils.init_http_client(namespace)
    return namespace


@pytest.fixture
def source(args: Namespace) -> RolloutDataSourceWithBuffer:
    """The built-in data source over the prompts."""
    return RolloutDataSourceWithBuffer(args)


@pytest.fixture
def groups(args: Namespace, source: RolloutDataSourceWithBuffer) -> list[list[Sample]]:
    """Two groups as they are when generation and rewards are done; rewards differ within a group."""
    drawn: list[list[Sample]] = source.get_samples(2)
    for number, sample in enumerate(sample for group in drawn for sample in group):
        prompt = [ord(c) for c in str(sample.prompt)]
        reply = hashed_reply([number, *prompt], {})
        sample.append_response_tokens(
            args, tokens=reply, log_probs=[-0.5] * len(reply), text="".join(map(chr, reply)),
            meta_info={"finish_reason": {"type": "stop"}, "weight_version": "0"},
        )  # fmt: skip
        sample.tokens = prompt + sample.tokens
        sample.reward = {args.reward_key: float(number % 2)} if args.reward_key else float(number % 2)
    return drawn


@pytest.fixture
def samples(groups: list[list[Sample]]) -> list[Sample]:
    """The same, flat, as hooks after generation get them."""
    return [sample for group in groups for sample in group]
