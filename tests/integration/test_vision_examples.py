"""The example with images in several turns: two rollouts of its data and an evaluation, up to the trainer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.geo3k_vlm_multi_turn.make_data import make_data
from slime.arguments import parse_args
from slime.rollout import data_source, eval_rollout, sglang_rollout
from slime.rollout.base_types import call_rollout_fn
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta, load_function
from tests.support.agents import END
from tests.support.arguments import minimal_flags
from tests.support.episodes import turns_of
from tests.support.rollout_manager import set_up, without_ray
from tests.support.standin import StandInCluster
from tests.support.vision import PAD, Processor, VisionTokenizer

pytestmark = pytest.mark.integration
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "geo3k_vlm_multi_turn"


def flags(data: Path) -> list[str]:
    return [
        *minimal_flags(), "--prompt-data", str(data / "train.jsonl"), "--input-key", "messages", "--label-key", "label",
        "--apply-chat-template", "--custom-config-path", str(FOLDER / "pairs.yaml"),
        "--custom-generate-function-path", "examples.geo3k_vlm_multi_turn.rollout.generate",
        "--rm-type", "math",
        "--eval-prompt-data", "pairs", str(data / "pairs.jsonl"), "--eval-interval", "1",
        "--num-rollout", "2", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4", "--global-batch-size", "16",
        "--rollout-max-response-len", "120", "--rollout-temperature", "1",
    ]  # fmt: skip


def test_two_rollouts_and_an_evaluation(tmp_path, monkeypatch):
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(eval_rollout, "EVAL_PROMPT_DATASET", {})
    without_ray(tmp_path, monkeypatch)
    for module in (data_source, eval_rollout, sglang_rollout):
        monkeypatch.setattr(module, "load_tokenizer", lambda *a, **k: VisionTokenizer(), raising=False)
        monkeypatch.setattr(module, "load_processor", lambda *a, **k: Processor(), raising=False)
    SingletonMeta.clear_instances()
    make_data(tmp_path, seed=1, demonstrations=1)
    for name, number in (("train", None), ("pairs", 16)):
        rows = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines()[:number])
        # of one answer for all, which the stand-in does not see either
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({**row, "label": "11"}) + "\n" for row in rows))
    coin = random.Random(1)

    def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
        turns = turns_of("".join(map(chr, input_ids)))
        look = len(turns) == 2 and coin.random() < 0.6
        said = coin.choice(("look left", "look right") if look else ("\\boxed{11}", "\\boxed{12}"))
        return [ord(c) for c in said + END]

    with StandInCluster(1, reply=reply) as cluster:
        args = parse_args(flags(tmp_path))
        # a command line with --multimodal-keys is refused: the checkpoint of these flags does not see
        args.multimodal_keys, args.debug_train_only = {"image": "images"}, True
        for data_set in args.eval_datasets:
            data_set.multimodal_keys = args.multimodal_keys
        args.sglang_router_ip, args.sglang_router_port = cluster.host, cluster.port
        http_utils.init_http_client(args)
        manager = set_up(args)
        try:
            for rollout_id in range(2):
                shards = [box.inner.to_rollout_data() for box in manager.generate(rollout_id)]
                check(shards)
            found = call_rollout_fn(
                load_function(args.eval_function_path), args, 0, manager.data_source, evaluation=True
            )
        finally:
            run(http_utils._http_client.close())
            SingletonMeta.clear_instances()
        asked = cluster.engines[0].requests
    assert 0 < sum(found.data["pairs"]["rewards"]) < 16
    assert {len(request["image_data"]) for request in asked} == {1, 2}
    assert all(request["input_ids"].count(ord(PAD)) == len(request["image_data"]) for request in asked)


def check(shards: list[dict[str, Any]]) -> None:
    """Assert that the trainer gets a row of pixels for every pad, and loss on the model's own turns alone."""
    rewards = [reward for shard in shards for reward in shard["raw_reward"]]
    assert min(rewards) < max(rewards)
    turns = set()
    for shard in shards:
        for tokens, mask, length, images in zip(
            shard["tokens"],
            shard["loss_masks"],
            shard["response_lengths"],
            shard["multimodal_train_inputs"],
            strict=True,
        ):
            tokens = [int(token) for token in tokens]
            assert len(mask) == length < len(tokens)
            assert len(images["pixel_values"]) == tokens.count(ord(PAD))
            turns.add(len(images["image_grid_thw"]))
            said = "".join(chr(token) for token, on in zip(tokens[-length:], mask, strict=True) if on)
            assert PAD not in said
            assert said.count(END) == len(images["image_grid_thw"])
    assert turns == {1, 2}


def test_the_files_of_settings_name_environments():
    for name in ("geo3k.yaml", "pairs.yaml"):
        settings = yaml.safe_load((FOLDER / name).read_text())
        assert settings["max_turns"] > 1
        assert callable(load_function(settings["rollout_interaction_env_path"] + ".build_env"))
