"""Engines answer only their health checks without a key, and weights are behind a second key."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from importlib.metadata import files
from types import ModuleType
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, WebSocket

from tests.support.engine_plugin import engine_plugin

KEY, ADMIN = "the first key", "the second key"
ROUTES = {
    "generate": "/generate /v1/chat/completions /server_info /model_info /v1/loads /v1/models /load_x",
    "everyday": "/abort_request /flush_cache /pause_generation /continue_generation",
    "weights": "/update_weights_from_tensor /update_weights_from_disk /init_weights_update_group /weights_checker "
    "/get_weights_by_name /release_memory_occupation /set_internal_state",
    "adapters": "/load_lora_adapter_from_tensors",
}


@pytest.fixture(scope="module")
def auth() -> ModuleType:
    """SGLang's own module, which needs nothing else of SGLang."""
    path = next(file for file in files("sglang") or () if str(file) == "sglang/srt/utils/auth.py").locate()
    spec = importlib.util.spec_from_file_location("sglang.srt.utils.auth", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sglang_auth_of_the_test"] = sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    del sys.modules[spec.name]
    return module


@pytest.fixture
def plugin(auth: ModuleType) -> Iterator[Any]:
    with engine_plugin({"utils.auth": auth}) as load:
        yield load("server.keys")


@pytest.fixture
def app(plugin: Any, auth: ModuleType) -> FastAPI:
    """A server with routes as SGLang has them, of which some are marked as administration."""
    app = FastAPI()

    def answer() -> str:
        return "ok"

    @auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL)
    def administer() -> str:
        return "ok"

    marked = (ROUTES["everyday"] + " " + ROUTES["weights"]).split()
    for path in ["/health", "/health_generate", "/ready", "/metrics", *" ".join(ROUTES.values()).split()]:
        app.add_api_route(path, administer if path in marked else answer, methods=["GET", "POST"])
    more = APIRouter()
    more.add_api_route("/scale_elastic_ep", administer, methods=["POST"])
    app.include_router(more)

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()

    plugin.add_key_check(app, api_key=KEY, admin_api_key=ADMIN)
    return app


def ask(app: FastAPI, path: str, authorization: str | None = None, method: str = "POST", **more: Any) -> int:
    """Return the status of a request; of a WebSocket, 101 when it is accepted and 403 when it is closed."""
    headers = list(more.pop("headers", [(b"host", b"engine")]))
    if authorization is not None:
        headers.append((b"authorization", authorization.encode()))
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": b"", "root_path": "", "scheme": "http", "server": ("engine", 1), "headers": headers, **more,
    }  # fmt: skip
    sent: list[Any] = []

    async def receive() -> Any:
        if scope["type"] == "websocket":
            return {"type": "websocket.connect"}
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    first = sent[0]
    return {"websocket.accept": 101, "websocket.close": 403}.get(first["type"]) or int(first["status"])


def paths(*groups: str) -> list[str]:
    return [path for group in groups for path in ROUTES[group].split()]


@pytest.mark.parametrize(
    "path", [*paths(*ROUTES), "/metrics", "/docs", "/openapi.json", "/nothing", "/scale_elastic_ep"]
)
def test_nothing_is_answered_without_a_key(app: FastAPI, path: str) -> None:
    for method in ("GET", "POST", "OPTIONS", "PUT"):
        for given in (None, "", "Bearer", "Bearer ", "Bearer EMPTY", f"Basic {KEY}", f"Bearer {KEY}x", KEY):
            assert ask(app, path, given, method) == 401


def test_health_is_answered_to_all_and_only_by_its_exact_path(app: FastAPI) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert ask(app, path, method="GET") == 200
        assert ask(app, path, method="POST") == 401
    for path in ("/healthy", "/health/", "/health/../generate", "//health", "/health_generate/x", "/readyz"):
        assert ask(app, path, method="GET") == 401


def test_the_host_header_does_not_choose_the_path(app: FastAPI) -> None:
    """``request.url`` of Starlette is put together from it."""
    for host in (b"engine/health?", b"engine/health#", b"x/metrics?"):
        assert ask(app, "/update_weights_from_tensor", headers=[(b"host", host)]) == 401


def test_one_of_several_authorizations_will_do(app: FastAPI) -> None:
    """sglang-router adds its own to that of the client."""
    other = [(b"host", b"engine"), (b"authorization", b"Bearer EMPTY")]
    assert ask(app, "/generate", f"Bearer {KEY}", headers=other) == 200
    assert ask(app, "/update_weights_from_disk", f"Bearer {KEY}", headers=other) == 401
    assert ask(app, "/generate", "Bearer other", headers=other) == 401


def test_the_first_key_generates_and_controls(app: FastAPI) -> None:
    for path in paths("generate", "everyday"):
        assert ask(app, path, f"Bearer {KEY}") == 200
        assert ask(app, path, f"bearer {KEY}") == 200
    assert ask(app, "/metrics", f"Bearer {KEY}", "GET") == 200


def test_weights_need_the_second_key_which_opens_everything(app: FastAPI) -> None:
    for path in [*paths("weights", "adapters"), "/scale_elastic_ep"]:
        assert ask(app, path, f"Bearer {KEY}") == 401
    for path in [*paths(*ROUTES), "/scale_elastic_ep"]:
        assert ask(app, path, f"Bearer {ADMIN}") == 200


def test_websockets_need_a_key(app: FastAPI) -> None:
    for given, status in ((None, 403), ("Bearer EMPTY", 403), (f"Bearer {KEY}", 101)):
        assert ask(app, "/v1/realtime", given, type="websocket", scheme="ws") == status


def test_one_key_opens_everything(plugin: Any) -> None:
    app = FastAPI()
    app.add_api_route("/load_lora_adapter_from_tensors", lambda: "ok", methods=["POST"])
    plugin.add_key_check(app, api_key=KEY, admin_api_key=None)
    assert ask(app, "/load_lora_adapter_from_tensors") == 401
    assert ask(app, "/load_lora_adapter_from_tensors", f"Bearer {KEY}") == 200


def test_the_arguments_that_are_shown_have_no_keys(plugin: Any) -> None:
    class ServerArgs:
        _launch_command: str | None = f"sglang --api-key {KEY} --admin-api-key {ADMIN} --port 1"
        launch_command = property(lambda self: self._launch_command)

    server_args = ServerArgs()
    arguments = {"api_key": KEY, "admin_api_key": ADMIN, "ssl_keyfile_password": None, "port": 1}
    shown = plugin.without_keys(arguments, server_args)
    assert server_args.launch_command == "sglang --api-key *** --admin-api-key *** --port 1"
    server_args._launch_command = None
    assert plugin.without_keys(arguments, server_args) == shown
    assert shown == {"api_key": "***", "admin_api_key": "***", "ssl_keyfile_password": None, "port": 1}
