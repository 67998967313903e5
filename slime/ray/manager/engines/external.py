"""An engine that others started: the run attaches to it, and leaves it as it is."""

from __future__ import annotations

import contextlib
import itertools
import time

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.external import external_engine_infos_from_args, inspect
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError, EngineTimeoutError
from slime.servers.types import EngineInfo, weight_group

POLL_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 5.0
GENERATE_TIMEOUT_S, GENERATE_POLL_S = 30.0, 1.0
LOST_CONNECTIONS = 3
"""So many polls in a row without a connection mean that the server has ended."""
MOST_STAGES = 64
"""Of the trainers whose process groups may be left: no trainer has as many pipeline stages."""
_lives = itertools.count(1)


def external_plans(args: Args) -> list[EnginePlan]:
    """Return the engines of ``--rollout-external-engine-addrs``, which have no slots of the run's."""
    plans, offset = [], 0
    for rank, info in enumerate(external_engine_infos_from_args(args)):
        plans.append(EnginePlan(rank, offset, info.num_gpus, info.num_gpus, 1, info.worker_type, url=info.url))
        offset += info.num_gpus
    return plans


class ExternalEngine:
    """The server at ``plan.url``. One instance is one time that it is attached; nothing here starts or ends it."""

    def __init__(self, args: Args, plan: EnginePlan, api_key: str | None, admin_api_key: str | None = None) -> None:
        assert plan.url is not None
        self.args, self.plan, self.url = args, plan, plan.url
        self._api_key, self._admin_api_key = api_key, admin_api_key
        self._weight_version: str | None = None
        self._unreachable = 0
        self._attached = False

    def __str__(self) -> str:
        return str(self.plan)

    def start(self) -> EngineInfo:
        """Attach to the engine; return where it is reached, once it generates.

        What an earlier run may have left is undone: a pause, and the process group of its pushes. Raises NoAnswerError
        when no engine is there, ArgumentError for one that the run cannot use, EngineError for one that does not
        generate within ``--engine-ready-timeout``.
        """
        found = inspect(self.args, self.url, self._api_key)
        if found.worker_type != self.plan.worker_type:
            raise ArgumentError(f"{self} was a {self.plan.worker_type} engine, and is a {found.worker_type} engine now")
        client = self._client(GENERATE_TIMEOUT_S)
        client.resume()
        self._leave_groups(client)
        deadline = time.monotonic() + self.args.engine_ready_timeout
        while True:
            try:
                client.health_generate(GENERATE_TIMEOUT_S)
                break
            except EngineError as e:
                has_ended = e.status is None and not isinstance(e, EngineTimeoutError)
                if has_ended or time.monotonic() > deadline:
                    raise
            time.sleep(GENERATE_POLL_S)
        self._weight_version, self._attached = found.weight_version, True
        return EngineInfo(
            url=self.url,
            num_gpus=found.num_gpus,
            gpu_offset=self.plan.gpu_offset,
            worker_type=found.worker_type,
            rank=self.plan.rank,
            api_key=self._api_key,
            admin_api_key=self._admin_api_key,
            bootstrap_port=found.disaggregation_bootstrap_port,
            life=next(_lives),
        )

    def pull_weights(self, directory: str, deadline_s: float) -> str:
        """The run has no process on the engine's host: ``--update-weight-local-checkpoint-dir`` is refused."""
        raise RuntimeError(f"{self} runs on a host of its own, where nothing copies {directory}")

    def poll(self) -> str | None:
        """Return None while the engine runs, else what has become of it.

        One that was restarted by others answers as ever, with the weights of its checkpoint: its weight version is no
        number again. One that is late may be busy: health checks decide on it (``--use-fault-tolerance``).
        """
        try:
            version = str(self._client(POLL_TIMEOUT_S).model_info(POLL_TIMEOUT_S).get("weight_version"))
        except EngineError as e:
            if e.status is not None or isinstance(e, EngineTimeoutError):
                return None
            self._unreachable += 1
            if self._unreachable < LOST_CONNECTIONS:
                return None
            return f"{self} ({self.url}) accepts no connections any more. {e}"
        self._unreachable = 0
        before, self._weight_version = self._weight_version, version
        if before is not None and before.isdecimal() and not version.isdecimal():
            return f"{self} ({self.url}) was restarted by others: its weight version is {version}, and was {before}."
        return None

    def last_lines(self) -> list[str]:
        """Its log is not here."""
        return []

    def end(self) -> None:
        """Leave the engine: it continues to run, without the process group of this run."""
        if self._attached:
            self._attached = False
            self._leave_groups(self._client(LEAVE_TIMEOUT_S))

    def _client(self, timeout: float) -> EngineClient:
        return EngineClient(self.url, self._api_key, timeout, admin_api_key=self._admin_api_key)

    def _leave_groups(self, client: EngineClient) -> None:
        with contextlib.suppress(EngineError):  # raised for the first stage that has no group, but not by every server
            for stage in range(MOST_STAGES):
                client.destroy_weights_update_group(group_name=weight_group(stage))
