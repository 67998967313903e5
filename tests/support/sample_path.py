"""Files of slime that one sample enters: ``python -m tests.support.sample_path``.

One synchronous rollout against stand-in engines, its conversion to shards and one training step run in one process, and
the file of every function that is entered is noted. Reward workers are processes of their own and are not seen.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from tests.support.distributed import ROOT, run_distributed

PACKAGE = f"{ROOT / 'slime'}/"


@contextmanager
def entered_files() -> Iterator[set[str]]:
    """Collect the files of slime, relative to it, whose functions any thread enters within the block."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
            found.add(code.co_filename.removeprefix(PACKAGE))

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])  # type: ignore[arg-type]


def record(folder: str) -> dict[str, list[str]]:
    """Return the files that the second of two rollouts and the second training step enter."""
    from slime.ray.manager import rollout_manager
    from slime.rollout import data_source, sglang_rollout
    from slime.servers import http_utils
    from tests.support.ranks import new_trainer
    from tests.support.rollout_args import CharTokenizer, rollout_args, write_prompts
    from tests.support.standin import StandInCluster
    from tests.support.trainer import tiny_checkpoint

    trainer, _ = new_trainer(tiny_checkpoint(Path(folder) / "model", seed=0), advantage_estimator="grpo")
    for module in (sglang_rollout, data_source):
        module.load_tokenizer = lambda *a, **k: CharTokenizer()  # type: ignore[attr-defined]
    with (
        entered_files() as rolled_out,
        StandInCluster(2) as engines,
    ):  # threads that start within are recorded from there
        args = rollout_args(
            prompt_data=str(write_prompts(Path(folder) / "prompts.jsonl", 32)),
            sglang_router_ip=engines.host,
            sglang_router_port=engines.port,
            run_dir=f"{folder}/run",
            debug_train_only=True,  # no engines of its own
            global_batch_size=8,
        )
        silent = mock.patch.object(rollout_manager.worker, "begin")  # what fails is to be seen in the rank's log
        with silent, mock.patch.object(rollout_manager, "ray", mock.Mock(put=lambda shard: shard)):
            manager = rollout_manager.RolloutManager(args)
            manager.setup((None, [], []), {})
            http_utils.init_http_client(args)
            manager.set_train_parallel_config(trainer.parallel_config)
            for rollout_id in range(2):
                rolled_out.clear()
                [box] = manager.generate(rollout_id)
                with entered_files() as trained:
                    trainer.train(rollout_id, box.inner)
        found = {"rollout and conversion": sorted(rolled_out), "training": sorted(trained)}
        manager.dispose()
    return found


def main() -> None:
    """Print the files by stretch and their number."""
    with tempfile.TemporaryDirectory() as folder:
        [found] = run_distributed("tests.support.sample_path:record", 1, {"folder": folder})
    for stretch, files in found.items():
        print(f"{stretch}: {len(files)} files", *files, sep="\n  ")
    print(f"both: {len(set().union(*found.values()))} files")


if __name__ == "__main__":
    main()
