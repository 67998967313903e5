"""Blocking control of one SGLang engine: health, pause, cache, memory and weights.

Every method raises ``EngineError`` for a status from 400 up (with the reply's text) or when the engine cannot be
reached, and ``EngineTimeoutError`` when it does not answer in time. The router forwards none of these calls: they go
to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

from slime.servers.http import BlockingHttp, EngineError, EngineTimeoutError
from slime.servers.loads import num_requests_from_load
from slime.servers.types import EngineInfo

PauseMode = Literal["abort", "retract", "in_place"]
WeightCheck = Literal["checksum", "snapshot", "reset_tensors", "compare"]

_FLUSH_POLL_S = 0.2
_SHORT_S = 30.0


class EngineClient:
    """Calls to the engine at ``url``; ``timeout`` (s) bounds each call that names no other.

    ``admin_api_key`` is sent where the engine is controlled, ``api_key`` with every other call, and with all if there
    is one key only.
    """

    def __init__(
        self, url: str, api_key: str | None = None, timeout: float = 600.0, *, admin_api_key: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._http, self._control = (
            BlockingHttp(self.url, api_key=key, timeout=timeout, error=EngineError, timeout_error=EngineTimeoutError)
            for key in (api_key, admin_api_key or api_key)
        )

    @classmethod
    def of(cls, info: EngineInfo, timeout: float = 600.0) -> EngineClient:
        """Return a client with the keys of ``info``."""
        return cls(info.url, info.api_key, timeout, admin_api_key=info.admin_api_key)

    def is_healthy(self, timeout: float = 5.0) -> bool:
        """True when ``/health`` answers 200 within ``timeout`` seconds. Never raises."""
        try:
            self.health(timeout)
        except EngineError:
            return False
        return True

    def health(self, timeout: float = 5.0) -> None:
        """Return when the HTTP server is up (``/health``)."""
        self._http.get("/health", timeout=timeout)

    def health_generate(self, timeout: float = _SHORT_S) -> None:
        """Return when the engine has generated a token (``/health_generate``; takes about a second)."""
        self._http.get("/health_generate", timeout=timeout)

    def model_info(self, timeout: float = _SHORT_S) -> dict[str, Any]:
        """Return ``/model_info``: model path, weight version, architectures."""
        return dict(self._http.get("/model_info", timeout=timeout).json())

    def server_info(self) -> dict[str, Any]:
        """Return ``/server_info`` (older: ``/get_server_info``): the resolved server arguments and internal state."""
        try:
            return dict(self._http.get("/server_info", timeout=_SHORT_S).json())
        except EngineError as e:
            if e.status != 404:
                raise
        return dict(self._http.get("/get_server_info", timeout=_SHORT_S).json())

    def weight_version(self) -> str:
        """Return the version given with the last weight update; ``default`` before the first."""
        return str(self.model_info()["weight_version"])

    def generate(self, payload: dict[str, Any], timeout: float | None = None) -> Any:
        """POST ``/generate`` and return the reply: for checks and tools, rollouts use the asynchronous client."""
        return self._http.post("/generate", payload, timeout=timeout).json()

    def loads(self, timeout: float = _SHORT_S) -> Any:
        """Return ``/v1/loads``: requests and tokens per data-parallel rank. The scheduler answers, also when paused."""
        return self._http.get("/v1/loads?include=core", timeout=timeout).json()

    def num_requests(self) -> int:
        """Return how many requests the engine holds, running and waiting."""
        return num_requests_from_load(self.loads())

    def abort_all(self) -> None:
        """Abort every request; each is answered with what it has and finish reason ``abort``."""
        self._control.post("/abort_request", {"abort_all": True}, timeout=_SHORT_S)

    def abort(self, rid: str) -> None:
        """Abort the request with id ``rid`` (and those whose id begins so)."""
        self._control.post("/abort_request", {"rid": rid}, timeout=_SHORT_S)

    def pause(self, mode: PauseMode = "abort") -> None:
        """Stop generating; new requests wait at the server until :meth:`resume`.

        Args:
            mode: ``abort`` ends requests in flight, and returns when none is left. ``retract`` puts them back into the
                queue without their cache: they continue under the new weights. ``in_place`` keeps them and their cache,
                which then cannot be flushed.
        """
        self._control.post("/pause_generation", {"mode": mode})

    def resume(self) -> None:
        """Continue after :meth:`pause`."""
        self._control.post("/continue_generation", {})

    def flush_cache(self, deadline_s: float = 60.0) -> None:
        """Empty the prefix cache, waiting up to ``deadline_s`` until the engine holds no running request."""
        deadline = time.monotonic() + deadline_s
        while True:
            try:
                self._control.post("/flush_cache", timeout=max(1.0, deadline - time.monotonic()))
                return
            except EngineTimeoutError:
                raise
            except EngineError as e:
                if e.status != 400:
                    raise
                if time.monotonic() > deadline:
                    raise EngineTimeoutError(
                        e.method,
                        e.url,
                        status=e.status,
                        body=f"{e.body.strip()} (for {deadline_s:g} s)",
                        hint="Requests are still running: abort or pause first. With pause mode 'retract' an engine "
                        "that slime did not start cannot flush while requests wait (--weight-sync-pause-mode abort).",
                    ) from e
            time.sleep(_FLUSH_POLL_S)

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Flush the cache and free GPU memory: ``tags`` as in ``resume_memory``; None frees all."""
        if tags is None or "kv_cache" in tags:
            self.flush_cache()
        self._control.post("/release_memory_occupation", {} if tags is None else {"tags": list(tags)})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Take GPU memory back: ``tags`` out of ``weights``, ``kv_cache``, ``cuda_graph``; None takes all."""
        self._control.post("/resume_memory_occupation", {} if tags is None else {"tags": list(tags)})

    def init_weights_update_group(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group of ``world_size`` ranks; the engine's first rank is ``rank_offset``.

        Blocks until all ranks have joined: call all engines at once and join as rank 0 meanwhile.
        """
        self._weights_call(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def destroy_weights_update_group(self, *, group_name: str) -> None:
        """Leave the process group."""
        self._weights_call("/destroy_weights_update_group", {"group_name": group_name})

    def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Load tensors that rank 0 of the group broadcasts now; blocks until they have been received and loaded.

        Args:
            names: Hugging Face parameter names.
            dtypes: torch dtype names without ``torch.``.
            shapes: their shapes.
            group_name: as given to :meth:`init_weights_update_group`.
            load_format: ``flattened_bucket``: one broadcast of all bytes (uint8); None: one broadcast per tensor.
            flush_cache: empty the prefix cache afterwards (fails while requests run).
            weight_version: the version the engine reports from now on; None leaves it.
        """
        self._weights_call(
            "/update_weights_from_distributed",
            {
                "names": list(names),
                "dtypes": list(dtypes),
                "shapes": [list(s) for s in shapes],
                "group_name": group_name,
                "load_format": load_format,
                "flush_cache": flush_cache,
                "weight_version": weight_version,
            },
        )

    def update_weights_from_tensor(
        self,
        *,
        serialized_named_tensors: Sequence[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
        disable_draft_model: bool | None = None,
    ) -> None:
        """Load tensors from ``serialized_named_tensors``: one base64 text per engine rank, of a pickle that the
        engine's restricted unpickler accepts (on CUDA, IPC handles). ``disable_draft_model``: not into the draft model.
        """
        self._weights_call(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": list(serialized_named_tensors),
                "load_format": load_format,
                "flush_cache": flush_cache,
                "weight_version": weight_version,
                "disable_draft_model": disable_draft_model,
            },
        )

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        weight_version: str | None = None,
    ) -> None:
        """Load the Hugging Face checkpoint at ``model_path``, a path on the engine's host."""
        self._weights_call(
            "/update_weights_from_disk",
            {
                "model_path": str(model_path),
                "load_format": load_format,
                "flush_cache": flush_cache,
                "weight_version": weight_version,
            },
        )

    def load_lora_adapter_from_tensors(
        self, *, lora_name: str, config_dict: dict[str, Any], serialized_named_tensors: Sequence[str]
    ) -> None:
        """Load an adapter under a new name; requests continue. Of an engine that runs with ``--enable-lora``.

        Args:
            lora_name: as requests may name it.
            config_dict: PEFT's ``adapter_config.json``.
            serialized_named_tensors: one text per engine rank, as ``update_weights_from_tensor`` takes them, each with
                all tensors of the adapter.
        """
        self._weights_call(
            "/load_lora_adapter_from_tensors",
            {
                "lora_name": lora_name,
                "config_dict": config_dict,
                "serialized_named_tensors": list(serialized_named_tensors),
                "load_format": "flattened_bucket",
            },
        )

    def update_weight_version(self, version: str) -> None:
        """Set the version that the engine reports, without a change of its weights; requests continue."""
        self._weights_call("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def weights_checker(self, action: WeightCheck) -> dict[str, Any]:
        """Run one step of SGLang's weight check and return its reply.

        ``snapshot`` keeps a copy of all weights, ``reset_tensors`` overwrites them with random numbers, ``compare``
        raises ``EngineError`` (400) naming the tensors that differ from the snapshot, ``checksum`` hashes them.
        """
        return dict(self._control.post("/weights_checker", {"action": action}).json())

    def weights_checksum(self) -> str:
        """Return one hash over all weights of all engine ranks: equal weights under equal parallelism hash equal."""
        return str(self.weights_checker("checksum")["per_engine_checksum"])

    def _weights_call(self, path: str, body: dict[str, Any]) -> None:
        reply = self._control.post(path, {k: v for k, v in body.items() if v is not None})
        result = reply.json()
        if not result.get("success", True):
            raise EngineError(
                "POST", f"{self.url}{path}", status=reply.status_code, body=str(result.get("message", ""))
            )
