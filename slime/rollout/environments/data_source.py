"""``--data-source-path slime.rollout.environments.EnvironmentDataSource``: which environment a group acts in, how hard
its task is, and how that follows the success of earlier groups.

Without ``--prompt-data`` environments make their tasks up from a seed. What is known of each environment is in the data
source's metadata, which is saved with every checkpoint.
"""

from __future__ import annotations

import random
from typing import Any

from slime.arguments.args import Args
from slime.arguments.files.environments import Difficulty, environments_of
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.groups import copy_prompt
from slime.utils.data import Dataset
from slime.utils.types import Sample, iter_samples

STATE = "environments"
"""The key of the metadata."""
_COUNTED = "difficulty_counted"


class EnvironmentDataSource(RolloutDataSourceWithBuffer):
    """Draws the environment of each group by weight, with a seed that depends on the number of the group alone.

    Rows of ``--prompt-data`` belong to the environment that their metadata names, and are drawn epoch by epoch of its
    own. Samples get ``metadata["environment"]``, ``["difficulty"]`` and ``["seed"]``.
    """

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        self.environments = environments_of(args)
        self._rows: dict[str, list[Sample]] = {name: [] for name in self.environments}
        for row in self.dataset.samples if self.dataset is not None else ():
            self._rows[self._owner(row)].append(row)
        missing = [name for name, rows in self._rows.items() if not rows and self.environments[name].weight]
        if self.dataset is not None and missing:
            raise ValueError(
                f"--prompt-data {args.prompt_data} has no row of {', '.join(missing)}; give the environment the weight "
                'of 0, or rows with its name as metadata["environment"]'
            )

    def _load_dataset(self) -> Dataset | None:
        return super()._load_dataset() if self.args.prompt_data else None

    def _owner(self, row: Sample) -> str:
        name = (row.metadata or {}).get("environment")
        if name is None and len(self.environments) == 1:
            return next(iter(self.environments))
        if name not in self.environments:
            raise ValueError(
                f'--prompt-data {self.args.prompt_data}: a row has the metadata "environment": {name!r}, expected one '
                f"of {', '.join(self.environments)}"
            )
        return str(name)

    def _next_prompts(self, count: int) -> list[Sample]:
        return [self._draw(self.sample_group_index + offset) for offset in range(count)]

    def _draw(self, number: int) -> Sample:
        """Return the prompt of group ``number``."""
        rng = random.Random(f"{self.args.rollout_seed}/{number}")
        names = list(self.environments)
        name = rng.choices(names, [self.environments[one].weight for one in names])[0]
        state = self._state(name)
        sample = copy_prompt(self._row(name, state["drawn"])) if self._rows[name] else Sample()
        state["drawn"] += 1
        about = {"environment": name, "seed": rng.getrandbits(31)}
        if self.environments[name].difficulty is not None:
            about["difficulty"] = state["level"]
        sample.metadata = {**(sample.metadata or {}), **about}
        return sample

    def _row(self, name: str, drawn: int) -> Sample:
        rows = self._rows[name]
        epoch, place = divmod(drawn, len(rows))
        if self.args.rollout_shuffle:
            order = list(range(len(rows)))
            random.Random(f"{self.args.rollout_seed}/{name}/{epoch}").shuffle(order)
            place = order[place]
        return rows[place]

    def _state(self, name: str) -> dict[str, Any]:
        """Return what is kept of an environment: how many groups were ``drawn``, the present ``level`` of difficulty,
        and the ``recent`` episodes at that level, 1 for a success and 0 for none."""
        bounds = self.environments[name].difficulty
        start = {"drawn": 0, "level": bounds.start if bounds else 0, "recent": []}
        state: dict[str, Any] = self.metadata.setdefault(STATE, {}).setdefault(name, start)
        return state

    def record_completed(self, group: list[Sample]) -> None:
        """Let the difficulty follow a finished group, also one that the dynamic filter is going to drop.

        The journal gets the group as it was before it was counted: a resumed run, whose state is older, counts it.
        """
        super().record_completed(group)
        with self._draw_lock:
            for sample in iter_samples(group):
                self._count(sample)

    def _count(self, sample: Sample) -> None:
        metadata, episode = sample.metadata or {}, getattr(sample, "environment_episode", None)
        name = metadata.get("environment")
        if episode is None or name not in self.environments or metadata.get(_COUNTED):
            return
        sample.metadata = {**metadata, _COUNTED: True}
        bounds, state = self.environments[name].difficulty, self._state(name)
        if bounds is not None and metadata.get("difficulty") == state["level"]:
            follow(bounds, state, bool(episode["success"]))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the state of every environment, as JSON types."""
        with self._draw_lock:
            for name in self.environments:
                self._state(name)
            return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved place; an environment that is new there begins at its start, a level that is gone is the
        hardest that is left."""
        with self._draw_lock:
            super().load_state_dict(state)
            for name, entry in self.environments.items():
                if entry.difficulty is not None:
                    held = self._state(name)
                    held["level"] = min(held["level"], entry.difficulty.levels - 1)


def follow(bounds: Difficulty, state: dict[str, Any], success: bool) -> None:
    """Add an episode at the present level to ``state``; change the level when the window is full and says so.

    The window is empty after a change: only episodes of the new level count.
    """
    state["recent"] = [*state["recent"], int(success)][-bounds.window :]
    if len(state["recent"]) < bounds.window:
        return
    rate = sum(state["recent"]) / bounds.window
    step = int(rate >= bounds.raise_at) - int(rate <= bounds.lower_at)
    level = min(max(state["level"] + step, 0), bounds.levels - 1)
    if level != state["level"]:
        state["level"], state["recent"] = level, []
