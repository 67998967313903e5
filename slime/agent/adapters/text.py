"""Messages to token ids and back, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from slime.agent import sglang_parsers
from slime.agent.adapters.http_requests import bad_request
from slime.agent.adapters.provider import Message
from slime.agent.parsing import ParsedModelOutput, parse_model_output
from slime.agent.trajectory import TurnRecord

T = TypeVar("T")


class TextWorker:
    """One thread that renders prompts and parses answers.

    Templates and tokenizers are not for several threads at a time, and take too long for the event loop. Raises
    ValueError for parsers that SGLang does not have.
    """

    def __init__(self, tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
        sglang_parsers.check_names(tool_parser, reasoning_parser)
        self.tokenizer = tokenizer
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agent-text")

    async def render(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        """The prompt's token ids. Refuses messages that the chat template does not take."""
        return await self._run(self._render, messages, tools)

    async def parse(self, turn: TurnRecord, tools: list[Message] | None) -> ParsedModelOutput:
        """The parsed answer."""
        return await self._run(self._parse, turn, tools)

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return await self._run(self._decode, ids)

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _render(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        try:
            ids = self.tokenizer.apply_chat_template(
                messages, tools=tools or None, tokenize=True, add_generation_prompt=True
            )
        except Exception as e:
            raise bad_request(f"the chat template does not take these messages: {type(e).__name__}: {e}") from e
        return list(ids["input_ids"] if isinstance(ids, Mapping) else ids)

    def _parse(self, turn: TurnRecord, tools: list[Message] | None) -> ParsedModelOutput:
        ids = turn.output_ids
        special = {getattr(self.tokenizer, "eos_token_id", None), *getattr(self.tokenizer, "all_special_ids", ())}
        if len(ids) and turn.finish_reason == "stop" and ids[-1] in special:
            ids = ids[:-1]  # the token that ended the output is no text
        return parse_model_output(
            self._decode(ids),
            tools_schema=tools,
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
        )

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
