"""Tools of servers of the Model Context Protocol, through the package ``mcp``.

A server is started when its tools are first asked for, once per event loop, and is shared by all episodes there. One
that has ended is started again by the next episode.
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any
from weakref import WeakKeyDictionary

from mcp import ClientSession, McpError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS, METHOD_NOT_FOUND

from slime.arguments.files.environments import McpServer
from slime.rollout.environments.tools import Content, Tool, ToolError, without_images

_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Server]] = WeakKeyDictionary()


class _Server:
    """A running server. One task opens and closes the session, as anyio demands; any task may call."""

    def __init__(self, settings: McpServer) -> None:
        loop = asyncio.get_running_loop()
        self.name = " ".join([settings.command, *settings.args])
        self.ready: asyncio.Future[tuple[ClientSession, list[Tool]]] = loop.create_future()
        self.stop = asyncio.Event()
        self.task = loop.create_task(self._serve(settings), name=f"mcp-{settings.command}")

    async def _serve(self, settings: McpServer) -> None:
        parameters = StdioServerParameters(command=settings.command, args=settings.args, env=settings.env)
        try:
            async with stdio_client(parameters) as (read, write), ClientSession(read, write) as session:
                await session.initialize()
                listed = (await session.list_tools()).tools
                tools = [
                    Tool(tool.name, tool.description or "", tool.inputSchema, functools.partial(self._call, tool.name))
                    for tool in listed
                ]
                self.ready.set_result((session, tools))
                await self.stop.wait()
        except Exception as e:  # noqa: BLE001  (raised where the tools are asked for)
            if not self.ready.done():
                error = RuntimeError(f"the MCP server {self.name!r} did not start: {e!r}")
                error.__cause__ = e
                self.ready.set_exception(error)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Content:
        """Return what a tool answers, parts where there is an image. Raises ToolError for a mistake of the model,
        RuntimeError for no answer."""
        session, _ = await self.ready
        try:
            result = await session.call_tool(name, arguments)
        except McpError as e:
            if e.error.code in (INVALID_PARAMS, METHOD_NOT_FOUND):
                raise ToolError(e.error.message) from e
            if e.error.code == CONNECTION_CLOSED:
                self.stop.set()
            raise RuntimeError(f"the MCP server {self.name!r} did not answer a call of {name!r}: {e}") from e
        parts = [_part(part) for part in result.content]
        if result.isError or not any(part["type"] == "image" for part in parts):
            text = without_images(parts)
            if result.isError:
                raise ToolError(text)
            return text
        return parts


def _part(part: Any) -> dict[str, Any]:
    if part.type == "image":
        return {"type": "image", "image": f"data:{part.mimeType};base64,{part.data}"}
    return {"type": "text", "text": part.text if part.type == "text" else f"[{part.type}]"}


async def tools_of_server(settings: McpServer) -> list[Tool]:
    """Return the tools of a server, which is started if it does not run. Raises RuntimeError if it does not start."""
    running = _servers.setdefault(asyncio.get_running_loop(), {})
    key = json.dumps(settings.model_dump(), sort_keys=True)
    if key not in running or running[key].stop.is_set() or running[key].task.done():
        running[key] = _Server(settings)
    _, tools = await asyncio.shield(running[key].ready)
    return tools


async def close_servers() -> None:
    """End the servers of the running event loop."""
    for server in _servers.pop(asyncio.get_running_loop(), {}).values():
        server.stop.set()
        await asyncio.wait([server.task])
