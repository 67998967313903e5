"""Services that an execution calls besides the policy: models that are not trained."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.rm_hub.answer_text import final_answer
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.utils.http_utils import HttpRequestError, post


class ServiceFailure(RuntimeError):
    """A failure that is not the policy's fault: a model or a tool does not answer. ``service`` is its name."""

    def __init__(self, service: str, message: str) -> None:
        super().__init__(f"{service}: {message}")
        self.service = service


@dataclass(frozen=True)
class Settings:
    """The keys of ``--custom-config-path``, all with ``agentflow_`` before them."""

    tools: tuple[str, ...] = ("examples.agentflow.tools.BaseGenerator", "examples.agentflow.tools.PythonCoder")
    """Classes of tools by dotted path."""
    max_steps: int = 3
    planner_tokens: int = 2048
    train_analysis: bool = False
    """Let the policy analyze the query, and train it on that; else the executor's model does."""
    executor: str = "executor"
    """The model of ``--sglang-config`` that is analyst, executor, verifier, generator and base_generator."""
    coder: str = "coder"
    """The model that writes programs."""
    judge: str | None = "executor"
    """The model that grades answers that are not literally right; null: these are wrong."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """URLs of the ``/generate`` of models that are not in ``--sglang-config``, by name."""
    model_tokens: int = 4096
    """Of an answer of these models."""
    model_timeout: float = 600.0
    model_attempts: int = 5
    tool_timeout: float = 120.0
    """Seconds, both."""
    search_url: str | None = None
    """Of the retrieval server of ``WikipediaSearch``."""
    prompts: Mapping[str, str] = field(default_factory=dict)


class Models:
    """Asks the models that are not trained, at temperature 0."""

    def __init__(self, args: Namespace, settings: Settings) -> None:
        self.args, self.settings = args, settings

    async def ask(self, model: str, prompt: str, **fields: Any) -> str:
        """Return what ``model`` answers to the text ``prompts[prompt]`` with ``fields``, without its reasoning.

        The chat template is the policy's: models of another family need one of their own here. Raises ServiceFailure.
        """
        chat = [{"role": "user", "content": self.settings.prompts[prompt].format(**fields)}]
        tokenizer = GenerateState(self.args).tokenizer
        rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        params = {"temperature": 0, "max_new_tokens": self.settings.model_tokens}
        url = self.url(model)
        try:
            reply = await post(
                url, {"text": rendered, "sampling_params": params}, self.settings.model_attempts,
                timeout=self.settings.model_timeout,
            )  # fmt: skip
            return final_answer(reply["text"]).strip()
        except (HttpRequestError, LookupError, TypeError, AttributeError) as e:
            raise ServiceFailure(model, f"{url} did not answer {prompt!r}: {e!r}") from e

    def url(self, model: str) -> str:
        """Return the address of ``model``. Raises ValueError for one that is not served."""
        routers = getattr(self.args, "sglang_model_routers", None) or {}  # set where slime starts them
        if model in self.settings.urls:
            return self.settings.urls[model]
        if model not in routers and model != "default":  # where one model is served every name means it: the policy
            raise ValueError(
                f"agentflow asks the model {model!r}, which is not served; name it in --sglang-config with "
                "update_weights: false, or give its URL in agentflow_urls (default is the policy)"
            )
        return get_model_url(self.args, model)
