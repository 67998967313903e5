"""The tools of a real MCP server in a process of its own."""

from __future__ import annotations

import asyncio

import pytest

from slime.arguments.files.environments import McpServer
from slime.rollout.environments import ToolCall, ToolError, ToolRegistry
from tests.support.environments import MCP_SERVER

pytest.importorskip("mcp", reason="the package mcp is not installed (pip install 'slime[plugins]')")


async def test_tools_of_a_server_and_its_end():
    from slime.rollout.environments.mcp_tools import close_servers, tools_of_server

    server = McpServer(command=MCP_SERVER[0], args=MCP_SERVER[1:])
    try:
        tools = await tools_of_server(server)
        registry = ToolRegistry(tools)
        assert [tool.name for tool in tools] == ["twice", "fail", "exit"]
        assert (tools[0].description, tools[0].parameters["required"]) == ("Return twice x.", ["x"])
        answers = await asyncio.gather(*(registry.call(ToolCall("twice", {"x": x})) for x in range(8)))
        assert answers == [str(2 * x) for x in range(8)]
        for call in (ToolCall("fail", {}), ToolCall("twice", {"x": "y"})):
            with pytest.raises(ToolError):
                await registry.call(call)
        with pytest.raises(RuntimeError, match="did not answer a call of 'exit'"):
            await registry.call(ToolCall("exit", {}))
        again = ToolRegistry(await tools_of_server(server))  # it is started again
        assert await again.call(ToolCall("twice", {"x": 21})) == "42"
    finally:
        await close_servers()


async def test_a_server_that_does_not_start_is_named():
    from slime.rollout.environments.mcp_tools import close_servers, tools_of_server

    with pytest.raises(RuntimeError, match="the MCP server '/no/such/program x' did not start"):
        await tools_of_server(McpServer(command="/no/such/program", args=["x"]))
    await close_servers()
