"""Weights through files: real Megatron ranks write them, a real engine reads them while it has requests in flight."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.backends.sglang_utils.engine import EngineProcess
from slime.ray.manager.engines.members import Member, State
from slime.weight_sync import WeightSyncError, steps
from slime.weights import versions as version_files
from slime.weights.delta import host_copy as delta_files
from tests.integration.test_weight_sync import generate, start
from tests.support.arguments import run_args
from tests.support.distributed import run_distributed
from tests.support.engines import Reference, output_log_probs
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
PROMPT = list(range(40, 80))
TOKENS = 900  # long enough to be in flight while the files are read


def test_two_stages_write_what_an_engine_reads_with_requests_in_flight(tmp_path: Path) -> None:
    old, new = (make_tiny_checkpoint(tmp_path / f"model{seed}", seed=seed) for seed in (0, 1))
    shared, local = tmp_path / "shared", tmp_path / "local"
    stale = version_files.version_dir(shared, 1)
    stale.mkdir(parents=True)
    (stale / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier run")
    arguments = {"checkpoint": str(new), "folder": str(shared), "flags": ["--pipeline-model-parallel-size", "2"]}
    results = run_distributed("tests.support.weight_file_ranks:publish", 2, arguments, timeout=300)
    directory = version_files.version_dir(shared, 2)
    for rank, found in enumerate(results):
        assert found["directory"] == str(directory)
        whole, *changed = found["densities"]
        assert whole == 1.0
        assert all(0.008 < density < 0.012 for density in changed)
        assert found["listed"] == ["weight_v000002"]  # the first was removed, and so was what the earlier run left
        reported = [version_files.version_dir(shared, version) for version in (1, 2)]
        assert found["calls"] == [(rank, str(path), ["http://engine:1"], True) for path in reported]
        assert "fail_on_rank_1" in found["reported"]
        assert "the bucket is gone" in found["reported"]

    (process,) = start(old, [0], tmp_path)
    try:
        client = process.client(timeout=120)
        replies: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda i=i: replies.append(generate(client, [100 + i, 7, 8, 9], TOKENS)))  # type: ignore[misc]
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        while client.num_requests() < 2:
            assert time.monotonic() - begun < 30, "the requests did not begin"
            time.sleep(0.05)
        args = run_args(
            weight_sync_timeout=60.0,
            update_weight_local_checkpoint_dir=str(local),
        )
        engine = SimpleNamespace(pull_weights=lambda path, deadline: str(version_files.pull(path, local)))
        member = Member(engine, State.SERVING, process.info)  # type: ignore[arg-type]
        steps.load_files(args, [member], str(directory), 2, pause_mode="retract")  # type: ignore[arg-type]
        for thread in threads:
            thread.join(300)
        assert [len(r["output_ids"]) for r in replies] == [TOKENS, TOKENS]
        assert all(r["meta_info"]["finish_reason"]["type"] == "length" for r in replies)
        assert any(len(r["meta_info"]["weight_versions"]) > 1 for r in replies)

        assert client.weight_version() == "2"
        loaded = client.weights_checksum()
        reply = generate(client, PROMPT, 5)
        error = (output_log_probs(reply) - Reference(new).log_probs(PROMPT, reply["output_ids"])).abs().max()
        assert error <= 1e-5
        client.update_weights_from_disk(str(old), weight_version="old")
        assert client.weights_checksum() != loaded
        client.update_weights_from_disk(str(new), weight_version="new")
        assert client.weights_checksum() == loaded

        check_changes(args, process, Path(f"{shared}-delta"), tmp_path / "applied")

        # A file that is not what was written reaches no engine, and leaves it as it was: not even paused.
        shard = sorted(directory.glob("*.safetensors"))[0]
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        (version_files.version_dir(local, 2) / version_files.CHECKSUMS).unlink()
        with pytest.raises(WeightSyncError, match=rf"{shard.name} has xxh3-128"):
            steps.load_files(args, [member], str(directory), 3, pause_mode="retract")  # type: ignore[arg-type]
        assert client.weight_version() == "export"
        assert len(generate(client, PROMPT, 2)["output_ids"]) == 2
    finally:
        process.stop()


def check_changes(args: Any, process: EngineProcess, shared: Path, local: Path) -> None:
    """Load three versions, of which two are changes: the engine computes what it does with all of the last weights."""
    client = process.client(timeout=120)
    before = client.weights_checksum()
    engine = SimpleNamespace(pull_weights=lambda path, deadline: str(delta_files.pull(path, local)))
    member = Member(engine, State.SERVING, process.info)  # type: ignore[arg-type]
    for version in (1, 2, 3):
        directory, held = version_files.version_dir(shared, version), client.weights_checksum()
        delta_files.pull(directory, local)
        assert client.weights_checksum() == held  # files that it has read are not its weights
        steps.load_files(args, [member], str(directory), version, pause_mode="retract")
        assert client.weight_version() == str(version)
        assert (client.weights_checksum() == before) == (version == 1)  # what the engine had already
    assert [path.name for path in version_files.versions(local)] == ["weight_v000003"]
    loaded = client.weights_checksum()
    params = {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True}
    reply = client.generate({"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}, timeout=300)
    expected = Reference(shared / "export").log_probs(PROMPT, reply["output_ids"])
    assert (output_log_probs(dict(reply)) - expected).abs().max() <= 1e-5
    client.update_weights_from_disk(str(shared / "export"), weight_version="export")
    assert client.weights_checksum() == loaded
