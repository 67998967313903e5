"""The program that ``ScriptedHarness`` runs in a sandbox.

``player.py SCRIPT.json [POLICY.py]``, the prompt on standard input.

It needs Python 3.8 and nothing else.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import urllib.error
import urllib.request
from typing import Any

TURNS_USED_UP = 3
REQUEST_TIMEOUT_S = 1800


def ask(messages: list[dict[str, Any]], tools: list[Any] | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the model's next message."""
    body = {"model": os.environ["SLIME_MODEL"], "messages": messages, **fields, **({"tools": tools} if tools else {})}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=REQUEST_TIMEOUT_S) as reply:
            message: dict[str, Any] = json.load(reply)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as e:
        sys.exit(f"{request.full_url} answered {e.code}: {e.read().decode(errors='replace')[:2000]}")


def main() -> int:
    """Play the script; see ``ScriptedHarness`` for the exit codes."""
    with open(sys.argv[1], encoding="utf-8") as file:
        script = json.load(file)
    left = iter(script["turns"])
    policy: dict[str, Any] = {"act": lambda reply, messages: next(left, None)}
    if len(sys.argv) > 2:
        policy = runpy.run_path(sys.argv[2])
    messages = [{"role": "user", "content": sys.stdin.read()}]
    for _ in range(script["max_turns"]):
        reply = ask(messages, policy.get("TOOLS"), script["request"])
        print(json.dumps(reply), flush=True)
        messages.append(reply)
        following = policy["act"](reply, messages)
        if following is None:
            return 0
        messages += [{"role": "user", "content": following}] if isinstance(following, str) else following
    return TURNS_USED_UP


if __name__ == "__main__":
    sys.exit(main())
