"""slime's own flags, one pydantic model per subject, in the order of ``--help``."""

from __future__ import annotations

from slime.arguments.flag import Flag
from slime.arguments.group import ArgumentGroup, flags_of
from slime.arguments.groups.algorithm import Algorithm, Distillation, MultiTokenPrediction, OffPolicy, TeacherServer
from slime.arguments.groups.cluster import Cluster, ElasticEngines, ExternalEngines, FaultTolerance
from slime.arguments.groups.data import Batch, Data
from slime.arguments.groups.debug import Configuration, ContinuousIntegration, Debug, Profiling
from slime.arguments.groups.logging import Logging
from slime.arguments.groups.reward import Reward
from slime.arguments.groups.rollout import Environments, Eval, Rollout
from slime.arguments.groups.train import Checkpoint, Lora, MegatronHooks, Optimizer, Train
from slime.arguments.groups.weight_sync import WeightSync

ALL_GROUPS: tuple[type[ArgumentGroup], ...] = (
    Cluster, Train, Lora, Rollout, Environments, Data, Batch, Eval, Reward, Algorithm, OffPolicy, Optimizer, Checkpoint,
    WeightSync, Logging, Configuration, Debug, MegatronHooks, FaultTolerance, ElasticEngines, ExternalEngines,
    Distillation, MultiTokenPrediction, Profiling, ContinuousIntegration, TeacherServer,
)  # fmt: skip


def slime_flags() -> list[Flag]:
    """Every flag slime declares itself."""
    return [flag for group in ALL_GROUPS for flag in flags_of(group)]
