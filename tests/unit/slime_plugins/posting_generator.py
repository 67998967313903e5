"""Generators that write to the buffer by themselves, as programs written for a buffer without a key do."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import requests

TASK_TYPE = "posts"


def run_rollout(data: dict[str, Any]) -> None:
    url = f"{data['remote_buffer_url']}/buffer/write"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]
    item = {"instance_id": "a", "messages": messages, "reward": 1.0, "extra_info": {}}
    assert requests.post(url, json={"uid": "requests", **item}, timeout=60).status_code == 200
    body = json.dumps({"uid": "urllib", **item}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200
