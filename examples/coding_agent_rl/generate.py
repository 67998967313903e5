"""Run a coding agent on a task and grade its change (``--custom-generate-function-path``)."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from argparse import Namespace
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from examples.coding_agent_rl import swe
from examples.coding_agent_rl.operator_agent import OperatorHarness
from slime.agent.adapters import AnthropicAdapter, BaseAdapter, OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import BaseHarness, ClaudeCodeHarness, CodexHarness, MiniAgentHarness
from slime.agent.sandbox import DockerSandbox, E2BSandbox, LocalSandbox, Sandbox
from slime.rollout.sglang_rollout import get_model_url
from slime.utils.misc import SingletonMeta
from slime.utils.network import join_address
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def _number(name: str, default: float) -> float:
    return float(os.environ.get(name, default))


@dataclass(frozen=True)
class Config:
    """Read from variables of the environment when the module is imported."""

    adapter_public_host: str = os.environ.get("ADAPTER_PUBLIC_HOST", "127.0.0.1")
    """The name of this machine in sandboxes."""
    adapter_bind_host: str = os.environ.get("ADAPTER_BIND_HOST", "127.0.0.1")
    adapter_port: int = int(_number("ADAPTER_PORT", 18001))
    fork_merge_threshold: int = int(_number("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", 1024))
    agent_time_budget_sec: float = _number("SWE_AGENT_TIME_BUDGET_SEC", 1800)
    eval_timeout_sec: float = _number("SWE_EVAL_TIMEOUT_SEC", 600)
    rollout_guard_sec: float = _number("SWE_ROLLOUT_GUARD_SEC", 0)
    """A whole execution; 0: the two above and 180 s."""
    boot_concurrency: int = int(_number("SWE_BOOT_CONCURRENCY", 16))
    boot_retries: int = int(_number("SWE_BOOT_RETRIES", 2))


CONFIG = Config()
AGENTS: dict[str, tuple[type[BaseHarness], type[BaseAdapter]]] = {
    "claude_code": (ClaudeCodeHarness, AnthropicAdapter),
    "codex": (CodexHarness, OpenAIAdapter),
    "mini": (MiniAgentHarness, OpenAIAdapter),
    "operator": (OperatorHarness, OpenAIAdapter),
}
HARNESS_CLS, ADAPTER_CLS = AGENTS[os.environ.get("SWE_AGENT", "claude_code")]
SANDBOX = os.environ.get("SWE_SANDBOX", "e2b")
_boots = asyncio.Semaphore(CONFIG.boot_concurrency)


class AdapterService(metaclass=SingletonMeta):
    """One gateway serves all sessions of this process."""

    def __init__(self, args: Namespace) -> None:
        self.adapter = ADAPTER_CLS(
            tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code),
            sglang_url=get_model_url(args, "default", ""),
            tool_parser=args.sglang_tool_call_parser,
            reasoning_parser=args.sglang_reasoning_parser,
            fork_threshold_tokens=CONFIG.fork_merge_threshold,
            args=args,
        )
        self.handle = run_app_in_thread(self.adapter.app, host=CONFIG.adapter_bind_host, port=CONFIG.adapter_port)
        self.url = f"http://{join_address(CONFIG.adapter_public_host, self.handle.port)}"


def make_sandbox(image: str) -> Sandbox:
    """Return a sandbox of the kind that ``SWE_SANDBOX`` names, not started."""
    if SANDBOX == "local":
        return LocalSandbox()
    if SANDBOX == "docker":
        return DockerSandbox(image)
    if SANDBOX == "e2b":
        return E2BSandbox(image)
    raise ValueError(f"SWE_SANDBOX={SANDBOX}: expected e2b, docker or local")


async def boot_agent_sandbox(stack: AsyncExitStack, image: str, harness: BaseHarness | None) -> Sandbox:
    """Start a sandbox and install the agent in it; ``stack`` ends it. Tries ``boot_retries`` times again."""
    for left in range(CONFIG.boot_retries, -1, -1):
        async with AsyncExitStack() as own, _boots:
            try:
                sb = await own.enter_async_context(make_sandbox(image))
                if harness is not None:
                    await harness.install_cli(sb)
            except Exception as e:
                if not left:
                    raise
                logger.warning("a sandbox of %s did not start, which is tried again: %r", image, e)
                continue
            stack.push_async_exit(own.pop_all())
            return sb
    raise AssertionError("unreachable")


async def generate(
    args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Return the samples of the agent's session, all with the reward of its change; in an evaluation only the reward.

    What is not the model's fault (no sandbox, too much time, a session without a turn) is ABORTED, with the reason in
    ``metadata["abort_reason"]``, and not trained on. In an evaluation it counts as 0.
    """
    metadata = swe.get_metadata(sample)
    if reason := swe.evaluability_check(metadata):
        return _without_tokens(sample, evaluation, abort_reason=reason)
    service = AdapterService(args)
    sid = sample.session_id = sample.session_id or f"cagent-{uuid.uuid4().hex}"
    service.adapter.open_session(
        sid, sampling_defaults=sampling_params, max_context_tokens=args.rollout_max_context_len or 0
    )
    guard = CONFIG.rollout_guard_sec or CONFIG.agent_time_budget_sec + CONFIG.eval_timeout_sec + 180
    try:
        async with asyncio.timeout(guard):
            exit_code, found = await _solve(service, sid, metadata)
        notes = {
            "grading_solved": found.reward == 1.0, "applied_cleanly": found.applied_cleanly,
            "instance_id": metadata.get("instance_id"), "agent_exit_code": exit_code,
        }  # fmt: skip
        if evaluation:
            return _without_tokens(sample, evaluation, reward=found.reward, **notes)
        samples = await service.adapter.finish_session(
            sid, base_sample=sample, reward=found.reward, extra_metadata={**sample.metadata, **notes}
        )
        return samples or _without_tokens(sample, evaluation, abort_reason="adapter_session_empty")
    except TimeoutError:
        return _without_tokens(sample, evaluation, abort_reason="wall_clock_timeout")
    except Exception as e:
        logger.exception("the execution of %s failed", metadata.get("instance_id"))
        return _without_tokens(sample, evaluation, abort_reason=f"exception:{type(e).__name__}")
    finally:
        await service.adapter.drop_session(sid, wait_timeout=0)


async def _solve(service: AdapterService, sid: str, metadata: dict[str, Any]) -> tuple[int, swe.EvalResult]:
    """Let the agent work in one sandbox, and grade its change in another; return its exit code and the grade."""
    harness, workdir = HARNESS_CLS(), metadata["workdir"]
    async with AsyncExitStack() as stack:
        sb = await boot_agent_sandbox(stack, metadata["image"], harness)
        await swe.prepare_workspace(sb, metadata)
        prompt = swe.SWE_PROMPT.format(workdir=workdir, problem_statement=metadata["problem_statement"])
        exit_code = await harness.run(
            sb, workdir=workdir, session_id=sid, adapter_url=service.url,
            time_budget_sec=CONFIG.agent_time_budget_sec, prompt=prompt,
        )  # fmt: skip
        diff = await swe.git_diff(sb, workdir)
    async with AsyncExitStack() as stack:
        fresh = await boot_agent_sandbox(stack, metadata["image"], None)
        return exit_code, await swe.run_evaluation(fresh, metadata, diff, CONFIG.eval_timeout_sec)


def _without_tokens(sample: Sample, evaluation: bool, reward: float = 0.0, **notes: Any) -> Sample:
    """Make ``sample`` one that no loss is computed on: two tokens, of which the second is the response, with mask 0."""
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.reward, sample.remove_sample = [0], [0.0], reward, True
    sample.status = Sample.Status.COMPLETED if evaluation else Sample.Status.ABORTED
    sample.metadata = {**(sample.metadata or {}), **notes}
    return sample
