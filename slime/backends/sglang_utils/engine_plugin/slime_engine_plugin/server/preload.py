"""Imports for the process from which engines on a CPU are forked, in the order in which an engine does them."""

import sglang.srt.entrypoints.http_server
from sglang.srt.plugins import load_plugins

load_plugins()

import sglang.srt.models.registry  # noqa: E402, F401
