"""Ask for the engine's keys everywhere but at its health checks, and keep them secret.

SGLang's own check leaves ``/metrics`` and WebSockets open, finds out the path of a request by its ``Host`` header, and
lets whoever has the first key load adapters from the body of a request. Here the first key is for generating, questions
and the everyday control of an engine; reading and writing weights, and all else that SGLang calls administration, needs
the second one, which opens everything. ``/server_info`` and the log show neither.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    from fastapi import FastAPI
    from sglang.srt.server_args import ServerArgs
    from starlette.types import ASGIApp, Receive

OPEN = frozenset({"/health", "/health_generate", "/ready"})
EVERYDAY = frozenset({
    "/abort_request", "/flush_cache", "/pause_generation", "/continue_generation", "/start_profile", "/stop_profile",
})  # fmt: skip
"""SGLang calls these administration; routers and plug-ins send them with the first key."""
ADMINISTRATION = frozenset({"/load_lora_adapter_from_tensors", "/scale_elastic_ep"})
"""SGLang does not call these so, or not where it looks."""
MASK = "***"
SECRET = ("api_key", "admin_api_key", "ssl_keyfile_password")

Scope = MutableMapping[str, Any]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class KeyCheck:
    """The outermost layer of the server's application."""

    def __init__(self, app: ASGIApp, *, fastapi_app: FastAPI, api_key: str | None, admin_api_key: str | None) -> None:
        self.app, self._fastapi_app = app, fastapi_app
        self._api_key, self._admin_api_key = api_key, admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})

    def _may(self, scope: Scope) -> bool:
        from slime.servers.auth import bearer_token, is_key

        if scope["type"] == "http" and scope["path"] in OPEN and scope["method"] in ("GET", "HEAD"):
            return True
        # sglang-router adds its own to that of the client.
        given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        keys = [self._admin_api_key or self._api_key]
        if not (self._admin_api_key and self._is_administration(scope)):
            keys.append(self._api_key)
        return any(is_key(bearer_token(header), key) for header in given for key in keys if key)

    def _is_administration(self, scope: Scope) -> bool:
        from sglang.srt.utils.auth import AuthLevel, _get_auth_level_from_app_and_scope

        if scope["path"] in EVERYDAY or scope["type"] != "http":
            return False
        level = _get_auth_level_from_app_and_scope(self._fastapi_app, scope)
        return scope["path"] in ADMINISTRATION or level != AuthLevel.NORMAL


def add_key_check(app: FastAPI, *, api_key: str | None, admin_api_key: str | None) -> None:
    """In the place of ``add_api_key_middleware``."""
    app.add_middleware(KeyCheck, fastapi_app=app, api_key=api_key, admin_api_key=admin_api_key)


def without_keys(arguments: dict[str, Any], server_args: ServerArgs) -> dict[str, Any]:
    """After ``ServerArgs.resolved_dict``, which is shown in the log and to whoever asks what the server is.

    Beside it SGLang shows the words that it was started with, of which its private file of keys is a part by then.
    """
    command = server_args.launch_command
    for name in SECRET:
        if command and (value := arguments.get(name)):
            command = command.replace(value, MASK)
    server_args._launch_command = command
    return {name: MASK if name in SECRET and value else value for name, value in arguments.items()}


def register() -> None:
    """Register the hooks."""
    HookRegistry.register("sglang.srt.utils.auth.add_api_key_middleware", add_key_check, HookType.REPLACE)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolved_dict", without_keys, HookType.AFTER)
