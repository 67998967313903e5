"""Tools: plain functions with type hints, their JSON schemas, and the calls that models write."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from slime.rollout.hooks.hook import in_thread, is_coroutine_function

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


Content = str | list[dict[str, Any]]
"""Of a message: a text, or parts ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": ...}``."""


class ToolError(Exception):
    """A mistake of the model, which gets the message as its observation. Anything else that a tool raises is a failure
    of the environment."""


@dataclass(frozen=True)
class Tool:
    """``parameters`` is a JSON schema; ``call(arguments)`` returns what the model is to see, or an awaitable of it: a
    text, an image, a list of texts and images, or an object, which becomes JSON."""

    name: str
    description: str
    parameters: dict[str, Any]
    call: Callable[[dict[str, Any]], Any]

    def schema(self) -> dict[str, Any]:
        """Return the tool as chat templates and OpenAI's API have it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model asks for."""

    name: str
    arguments: dict[str, Any]


def tool_of(function: Callable[..., Any]) -> Tool:
    """Return the tool that ``function`` is: name, first paragraph of the docstring, and type hints.

    Arguments are checked against the hints before a call, and converted where JSON has no such type. A parameter is
    described with ``Annotated[int, pydantic.Field(description=...)]``. Raises TypeError for a parameter without a hint,
    and for one that has no name.
    """
    name = getattr(function, "__name__", type(function).__name__)
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise TypeError(f"tool {name!r}: a call names every argument, so {parameter} cannot be one")
        if parameter.name not in hints:
            raise TypeError(f"tool {name!r}: parameter {parameter.name!r} needs a type hint, for the schema")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = _without_titles(model.model_json_schema())
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return Tool(name, " ".join(paragraph.split()), schema, _Checked(function, model))


@dataclass(frozen=True)
class _Checked:
    """A function whose arguments are checked by a pydantic model."""

    function: Callable[..., Any]
    model: type[BaseModel]

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        try:
            checked = self.model.model_validate(arguments)
        except ValidationError as e:
            wrong = (f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in e.errors())
            raise ToolError("; ".join(wrong)) from None
        values = {name: getattr(checked, name) for name in self.model.model_fields}
        if is_coroutine_function(self.function):
            return await self.function(**values)
        return await in_thread(self.function, **values)


def _without_titles(schema: object) -> Any:
    """Drop the titles that pydantic makes of names; a property may be called title."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: {name: _without_titles(inner) for name, inner in value.items()}
        if key in ("properties", "$defs")
        else _without_titles(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }


class ToolRegistry:
    """Tools by name. Functions among ``tools`` become tools. Raises ValueError for a name that is taken."""

    def __init__(self, tools: Iterable[Tool | Callable[..., Any]] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            self.add(tool)

    def __len__(self) -> int:
        return len(self._tools)

    def add(self, tool: Tool | Callable[..., Any]) -> None:
        """Add a tool, or a function."""
        tool = tool if isinstance(tool, Tool) else tool_of(tool)
        if tool.name in self._tools:
            raise ValueError(f"two tools are called {tool.name!r}; names must be unique in an environment")
        self._tools[tool.name] = tool

    def schemas(self) -> list[dict[str, Any]]:
        """Return all tools as chat templates have them."""
        return [tool.schema() for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> Content:
        """Return what the tool answers: text, objects as JSON, or parts of a message where there is an image. Raises
        ToolError for a mistake of the model."""
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            raise ToolError(f"there is no tool {call.name!r}; the tools are: {known}")
        result = tool.call(call.arguments)
        if inspect.isawaitable(result):
            result = await result
        return content_of(result)


def content_of(result: object) -> Content:
    """Return the content of a message with ``result``."""
    items = result if isinstance(result, list) else [result]
    if not any(map(_is_image, items)):
        return _as_text(result)
    return [_part_of(item) for item in items]


def _part_of(item: Any) -> dict[str, Any]:
    if _is_part(item):
        return dict(item)
    return {"type": "image", "image": item} if _is_image(item) else {"type": "text", "text": _as_text(item)}


def without_images(content: Content) -> str:
    """Return a content as text, for models that do not see."""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"[{part['type']}]" for part in content)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _is_part(item: object) -> bool:
    return isinstance(item, dict) and (
        isinstance(item.get("text"), str) if item.get("type") == "text" else _is_image(item)
    )


def _is_image(item: object) -> bool:
    """A path or an address that a tool answers is none: it may come from a page of the web, say."""
    if isinstance(item, dict) and item.get("type") == "image":
        image = item.get("image")
        return isinstance(image, bytes) or (isinstance(image, str) and image.startswith("data:")) or _is_image(image)
    return type(item).__module__.partition(".")[0] == "PIL" and hasattr(item, "convert")


def parse_tool_calls(text: str) -> list[ToolCall | ToolError]:
    """Return the calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` of a turn in order.

    One that is no such JSON is a ToolError in its place. Text in ``<think>`` is no call.
    """
    found: list[ToolCall | ToolError] = []
    for body in _CALL.findall(text.rpartition("</think>")[2]):
        try:
            value = json.loads(body)
        except json.JSONDecodeError as e:
            found.append(ToolError(f"a tool call must be JSON: {e}"))
            continue
        name = value.get("name") if isinstance(value, dict) else None
        arguments = value.get("arguments", {}) if isinstance(value, dict) else None
        if isinstance(name, str) and isinstance(arguments, dict):
            found.append(ToolCall(name, arguments))
        else:
            found.append(ToolError('a tool call must be {"name": "...", "arguments": {...}}'))
    return found
