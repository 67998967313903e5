"""The data of a running engine that the driver, the trainers and the rollout manager share."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class EngineInfo:
    """One engine: a SGLang server, on one host or several.

    Attributes:
        url: base URL of its node-0 server, ``http://host:port``.
        num_gpus: engine ranks (tensor times pipeline size); without CUDA, slots.
        gpu_offset: index of its first GPU or slot among the run's reordered ones.
        worker_type: ``regular``, ``prefill``, ``decode`` or ``encoder``.
        rank: number of the engine among all engines of the run.
        api_key: bearer token the server asks for. Left out of ``repr``, so it reaches no log.
        admin_api_key: the one it asks for where weights are read or written; None where the first will do.
        life: of an engine that others started, which time that it was attached: after a restart it is another server
            at the same address.
        bootstrap_port: of a prefill engine, where decode engines ask it for key-value caches.
    """

    url: str
    num_gpus: int = 1
    gpu_offset: int = 0
    worker_type: str = "regular"
    rank: int = 0
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    life: int = 0
    bootstrap_port: int | None = None


def weight_group(stage: int) -> str:
    """Return the name of the process group that carries the weights of a pipeline stage of the trainer."""
    return f"slime-pp_{stage}"
