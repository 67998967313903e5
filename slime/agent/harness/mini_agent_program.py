"""The program that ``MiniAgentHarness`` runs in a sandbox: ``mini_agent.py MAX_TURNS``, the task on standard input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai

TURNS_USED_UP = 3
COMMAND_S = 120
SHOWN = 10_000
SYSTEM = (
    "You work in a directory of a Linux machine until the task is done. Look at files and run commands with bash, "
    "change files with edit. When you are done, answer without a tool call."
)


def function(name: str, description: str, **properties: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [
    function("bash", "Run a command in the work directory.", command="the command"),
    function(
        "edit", "Replace text in a file, or make a new file.", path="the file",
        old="the text to replace, which is in the file once; empty for a new file", new="the text in its place",
    ),
]  # fmt: skip


def bash(command: str) -> str:
    """Return the output of ``command``, errors included, and its exit code where that is not 0."""
    process = subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"not done within {COMMAND_S} s, and killed"
    text = out.decode(errors="replace")
    if len(text) > SHOWN:
        text = f"{text[: SHOWN // 2]}\n[{len(text) - SHOWN} characters left out]\n{text[-SHOWN // 2 :]}"
    return text if process.returncode == 0 else f"{text}\n[exit code {process.returncode}]"


def edit(path: str, old: str, new: str) -> str:
    """Replace the one place of ``old`` in a file; return what was done, or why not."""
    file = Path(path)
    if not old:
        if file.exists():
            return f"{path} exists; give the text to replace"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(new)
        return f"{path} made"
    text = file.read_text()
    if text.count(old) != 1:
        return f"the text is in {path} {text.count(old)} times, not once"
    file.write_text(text.replace(old, new))
    return f"{path} changed"


def result_of(call: Any) -> str:
    """Return the result of a tool call; mistakes of the model are results too."""
    tools: dict[str, Callable[..., str]] = {"bash": bash, "edit": edit}
    try:
        return tools[call.function.name](**json.loads(call.function.arguments))
    except (KeyError, TypeError, ValueError, OSError) as e:
        return f"{type(e).__name__}: {e}"


def main() -> int:
    """Work on the task; see ``MiniAgentHarness`` for the exit codes."""
    client = openai.OpenAI(max_retries=0, timeout=1800)
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": sys.stdin.read()}]
    tools: Any = TOOLS
    for _ in range(int(sys.argv[1])):
        answer = client.chat.completions.create(model=os.environ["SLIME_MODEL"], messages=messages, tools=tools)
        reply = answer.choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        print(json.dumps(messages[-1]), flush=True)
        if not reply.tool_calls:
            return 0
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})
    return TURNS_USED_UP


if __name__ == "__main__":
    sys.exit(main())
