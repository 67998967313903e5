"""Settings of ``--custom-config-path``, and the models and preferences in a row of the data."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.types import Sample

SYSTEM = "You are good at using tools."


@dataclass(frozen=True)
class Settings:
    """The keys of ``tool_orchestra`` in the file. Limits of calls are in seconds, of texts in characters or tokens."""

    retrieval: str = "http://127.0.0.1:8000/retrieve"
    topk: int = 3
    urls: Mapping[str, str] = field(default_factory=dict)
    """Base URLs of models that are not in ``--sglang-config``, with OpenAI's chat completions below ``/v1``."""
    model_mapping: Mapping[str, str] = field(default_factory=dict)
    """{what the orchestrator calls a model: its name}, for rows that do not say it."""
    tool_pricing: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """{name of a model: {"input", "output": price of a million tokens, "latency": s}}, likewise."""
    pref_vec: Mapping[str, float] = field(default_factory=lambda: {"accuracy": 1.0})
    judge: str = ""
    """The model that compares answers which are not equal to the label; "" for none."""
    system: str = SYSTEM
    layout: Literal["turns", "sequence"] = "turns"
    """A sample for every turn, whose prompt has all that is known; or one for all turns, to which it is added."""
    max_turns: int = 12
    execution_s: float = 360.0
    call_s: float = 120.0
    code_s: float = 60.0
    max_tokens: int = 2048
    """Of an expert's reply."""
    document_chars: int = 4000
    state_tokens: int = 24_000
    func_call_domain: str = ""
    """The function that makes the ``Domain`` of a task of the category ``func_call`` from ``(args, sample)``:
    ``examples.tool_orchestra.tau2_domain.Tau2Domain``, or a dotted path of your own."""
    func_call_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the domain: of tau2-bench's the options of ``examples/tau_bench/retail.yaml``."""
    func_call_turns: int = 40
    """``max_turns`` of these tasks."""

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """Return what the file sets, and the defaults of the rest."""
        return cls(**getattr(args, "tool_orchestra", {}))

    def url(self, args: Namespace, model: str) -> str:
        """Return the address of a model's chat completions. Raises ValueError for one that no server has."""
        path = "/v1/chat/completions"
        if model in self.urls:
            return self.urls[model].rstrip("/") + path
        if model not in (getattr(args, "sglang_model_routers", None) or {}):
            raise ValueError(f"no model {model!r} is served: name it in --sglang-config, or in urls of tool_orchestra")
        return get_model_url(args, model, path)


@dataclass(frozen=True)
class Task:
    """The question of one row, and its models."""

    problem: str
    category: str
    models: Mapping[str, str]
    pricing: Mapping[str, Mapping[str, float]]
    preferences: Mapping[str, float]
    budget: Mapping[str, float] = field(default_factory=dict)
    """The most ``cost`` and ``latency`` with which an evaluation counts an answer as right; {} for any."""

    @classmethod
    def of(cls, sample: Sample, settings: Settings) -> Task:
        """Return the task of a sample; what its metadata lack is that of ``settings``."""
        row: dict[str, Any] = sample.metadata or {}
        return cls(
            sample.prompt if isinstance(sample.prompt, str) else sample.prompt[-1]["content"],
            row.get("category", "qa"),
            row.get("model_mapping") or settings.model_mapping,
            row.get("tool_pricing") or settings.tool_pricing,
            row.get("pref_vec") or settings.pref_vec,
            row.get("budget") or {},
        )

    def aliases(self, tool: str) -> list[str]:
        """Return the names under which models of a tool are called: ``search-1``, ``search-2``, ..."""
        kind = {"enhance_reasoning": "reasoner", "call_expert": "expert"}.get(tool, tool)
        return sorted(alias for alias in self.models if alias.startswith(f"{kind}-"))
