"""Kill the whole of a real run at chosen stages, start the same command again, and count what was trained on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from slime.rollout.debug_data import load_rollout
from slime.rollout.requests.images import images_of
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.types import Sample
from tests.support.model_families import make_checkpoint
from tests.support.run_train import Run, rl_flags, run_train, sums_file
from tests.support.vision_models import make_vision_checkpoint, pictures_of_row, with_pictures
from tools.tiny_model import make_tiny_checkpoint, make_tokenizer

PROMPTS, BATCH, COPIES = 12, 4, 4
SEED = 42
DEADLINE_S = 300.0


class LoopKills:
    """A tiny run of whole epochs over 12 sums in ``folder``, saved after every rollout, with the log of its trainer.

    With ``images`` the prompts have no, one or two pictures, and the vision tower is trained too. ``family`` is one of
    ``model_families`` in the place of the dense model.
    """

    def __init__(
        self,
        folder: Path,
        rollouts: int,
        *,
        script: str = "train.py",
        extra: Sequence[str] = (),
        images: bool = False,
        family: str | None = None,
    ) -> None:
        self.folder, self.rollouts, self.script, self.images = folder, rollouts, script, images
        self.save, self.trained_file = folder / "save", folder / "trained.jsonl"
        prompts = sums_file(folder / "sums.jsonl", PROMPTS)
        if images:
            flags = rl_flags(make_vision_checkpoint(folder / "model", "qwen3_vl"), with_pictures(prompts))
            flags += ["--multimodal-keys", '{"image": "images"}', "--train-vision-tower"]
        elif family is not None:
            checkpoint = Path(make_checkpoint(folder, family, vocab_size=384))
            make_tokenizer(checkpoint)
            flags = rl_flags(checkpoint, prompts)
        else:
            flags = rl_flags(make_tiny_checkpoint(folder / "model"), prompts)
        words = f"""--rollout-num-gpus 1 --num-rollout {rollouts} --rollout-shuffle --rollout-seed {SEED}
            --rollout-max-response-len 128 --save {self.save} --load {self.save} --save-interval 1
            --custom-rm-path tests.support.rollout_hooks.parity_reward
            --rollout-data-postprocess-path tests.support.rollout_hooks.note_trained
            --save-debug-rollout-data {folder}/dump_{{rollout_id}}.pt"""
        self.flags = [*flags, *words.split(), *extra]
        self.env = {"SLIME_TEST_TRAINED": str(self.trained_file)}
        self.starts = 0
        self.surplus = "--over-sampling-batch-size" in extra

    # Kills

    def kill_in(self, stage: str, rng: random.Random) -> str:
        """Start the run and kill everything of it within ``stage``; return what it had reached."""
        self.starts += 1
        with Run(self.flags, self.folder / f"run{self.starts}", script=self.script, env=self.env) as run:
            ready = {"rollout": self._generates(), "training": self._trains(), "save": self._saves()}[stage]
            end = time.monotonic() + DEADLINE_S
            while not ready():
                assert run.process.poll() is None, f"it ended by itself:\n{run.output}{run.logs()}"
                assert time.monotonic() < end, f"not in {stage} after {DEADLINE_S} s:\n{run.output}{run.logs()}"
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, {"rollout": 0.5, "training": 1.0, "save": 0.2}[stage]))
            for pid in [run.process.pid, *run.processes()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            run.process.wait(10)
            run.assert_nothing_left()
        return f"{stage}: checkpoint {self.tracker()}, trained on {[r for r, _ in self.trained()]}, {self._files()}"

    def finish(self) -> None:
        """Start the run once more and let it come to its end."""
        self.starts += 1
        run_train(self.flags, self.folder / f"run{self.starts}", script=self.script, env=self.env)

    def _generates(self) -> Callable[[], bool]:
        """True from the first group that the journal keeps after this start."""
        before = self._journals()

        def generates() -> bool:
            return any(b'"completed"' in data and data != before.get(path) for path, data in self._journals().items())

        return generates

    def _trains(self) -> Callable[[], bool]:
        known = len(self.trained())
        return lambda: len(self.trained()) > known

    def _saves(self) -> Callable[[], bool]:
        known = set(self.save.glob("iter_*.writing"))
        return lambda: bool(set(self.save.glob("iter_*.writing")) - known)

    def _journals(self) -> dict[Path, bytes]:
        """Return what is in the journals that there are this moment."""
        found = {}
        for path in (self.save / "rollout").glob("journal_*.jsonl"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                found[path] = path.read_bytes()
        return found

    def _files(self) -> list[str]:
        found = [*self.save.glob("iter_*"), *(self.save / "rollout").glob("*")]
        return sorted(path.name for path in found)

    # What is left of it

    def tracker(self) -> int:
        """Return the last whole checkpoint, -1 before the first."""
        path = self.save / "latest_checkpointed_iteration.txt"
        return int(path.read_text()) if path.exists() else -1

    def trained(self) -> list[tuple[int, list[int]]]:
        """Return (rollout, sample indices) of every training step begun by any start, in order."""
        lines = self.trained_file.read_text().splitlines() if self.trained_file.exists() else []
        return [(record["rollout"], record["samples"]) for record in map(json.loads, lines)]

    def check(self) -> None:
        """Every prompt was trained on once, in the checkpoints that led to the last one, or waits in its state.

        Saved after every rollout, a rollout that was trained on twice was so because its first checkpoint never became
        whole: what counts is the last time.
        """
        counts = dict(self.trained())
        assert self.tracker() == self.rollouts - 1
        assert sorted(counts) == list(range(self.rollouts))
        trained: list[int] = []
        for rollout_id in range(self.rollouts):
            samples = load_rollout(self.folder / f"dump_{rollout_id}.pt")
            assert sorted(counts[rollout_id]) == sorted(s.index for s in samples if s.index is not None)
            groups = Counter(s.group_index for s in samples if s.group_index is not None)
            assert list(groups.values()) == [COPIES] * BATCH, (rollout_id, groups)
            for sample in samples:
                assert sample.group_index is not None
                self._check_prompt(sample, _row_of(sample.group_index))
            self._check_journal(rollout_id, sorted(groups))
            trained += groups
        state = json.loads((self.save / "rollout" / f"global_dataset_state_dict_{self.rollouts - 1}.json").read_text())
        waiting = [group[0]["group_index"] for group in [*state.get("in_flight", []), *state["buffer"]]]
        assert sorted(trained + waiting) == list(range(state["sample_group_index"])), (trained, waiting)
        if not self.surplus:
            assert trained == list(range(BATCH * self.rollouts))

    def _check_prompt(self, sample: Sample, row: int) -> None:
        """A sample was made from the ``row`` of the file, with the pictures of that row."""
        assert f"{row % 10}+{row // 10}=" in str(sample.prompt)
        if self.images:
            assert [encode_image_for_rollout_engine(image) for image in images_of(sample)] == [
                encode_image_for_rollout_engine(image) for image in pictures_of_row(row)
            ]
            grids = (sample.multimodal_train_inputs or {}).get("image_grid_thw", ())
            assert len(grids) == row % 3

    def _check_journal(self, rollout_id: int, groups: list[int]) -> None:
        """The run's own journal says the same where it is still kept."""
        path = self.save / "rollout" / f"journal_{rollout_id}.jsonl"
        if path.exists():
            records = [json.loads(line)["record"] for line in path.read_text().splitlines()]
            consumed = [record for record in records if record["kind"] == "consumed"]
            assert consumed
            assert consumed[-1] == {"kind": "consumed", "rollout": rollout_id, "groups": groups}


def _row_of(group: int) -> int:
    """Return the row of a group by the documented order: every epoch a permutation of the file, by seed and epoch."""
    numbers = list(range(PROMPTS))
    random.Random(SEED + group // PROMPTS).shuffle(numbers)
    return numbers[group % PROMPTS]
