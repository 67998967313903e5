"""Engines that join and leave while a run is in progress."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, DottedPath, flag


class ElasticEngines(ArgumentGroup):
    """How many engines there may be, and who decides."""

    title = "elastic engines"

    rollout_min_engines: int = flag(1, "so many engines of a model stay when engines are removed", ge=1)
    rollout_max_engines: int | None = flag(
        None,
        "so many engines may a model have when engines are added; default: as many as the Ray cluster has room for",
        ge=1,
    )
    custom_engine_scaling_path: DottedPath | None = flag(
        None,
        "dotted path of your own function that says how many engines each model is to have, within "
        "--rollout-min-engines and --rollout-max-engines",
    )
    engine_scaling_interval: float = flag(30.0, "seconds between two calls of that function", gt=0)
