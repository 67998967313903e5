"""A SGLang server that others run, as far as a control plane sees it: it can die, and be restarted at its address."""

from __future__ import annotations

import contextlib
from typing import Any

from tests.support.http_stub import Reply, Seen, http_stub


class ExternalServer:
    """Answers at ``url`` from ``start`` to ``die``; ``calls`` are the requests that change something."""

    def __init__(self, model_path: str, key: str | None = None, **server: Any) -> None:
        self.key = key
        self.server = {"model_path": model_path, "tp_size": 1, "pp_size": 1, "version": "0.5.20", **server}
        self.model = {"model_type": "qwen3", "is_generation": True}
        self.version, self.paused, self.groups = "default", False, ["slime-pp_0"]
        self.calls: list[str] = []
        self.unauthorized = 0
        self.blind = False
        """It does not see the directories of weights."""
        self.port = 0
        self._stack = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Begin to answer, with the weights of the checkpoint."""
        self.version, self.paused = "default", False
        stub = self._stack.enter_context(http_stub(self._answer, self.port))
        self.port = int(stub.url.rpartition(":")[2])

    def die(self) -> None:
        """Accept no connections any more."""
        self._stack.close()

    def restart(self) -> None:
        """Die and start again, with nothing of before."""
        self.die()
        self.groups = []
        self.start()

    def _answer(self, seen: Seen) -> Reply:
        if self.key is not None and seen.authorization != f"Bearer {self.key}" and seen.path != "/health":
            self.unauthorized += 1
            return 401, {"error": "Unauthorized"}
        path = seen.path.partition("?")[0]
        if path == "/server_info":
            return 200, self.server
        if path == "/model_info":
            return 200, {**self.model, "weight_version": self.version}
        if path == "/v1/loads":
            return 200, {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        if path in ("/health", "/health_generate"):
            return (503 if self.paused and path == "/health_generate" else 200), {}
        self.calls.append(path.removeprefix("/"))
        if path == "/destroy_weights_update_group":
            name = seen.body["group_name"]
            if name not in self.groups:
                return 400, {"success": False, "message": "The group to be destroyed does not exist."}
            self.groups.remove(name)
        elif path == "/pause_generation":
            self.paused = True
        elif path == "/continue_generation":
            self.paused = False
        elif path == "/update_weights_from_disk":
            if self.blind:
                return 400, {"success": False, "message": "no such model"}
            self.version = seen.body["weight_version"]
            self.calls[-1] += f" {seen.body['model_path']}"
        return 200, {"success": True}
