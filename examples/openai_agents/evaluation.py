"""The evaluation (``--eval-function-path``): the same agent, through a gateway in the process of the run."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from examples.openai_agents.tasks import agent_command, task_line
from examples.services import ROOT
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.serve import Gateway
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.eval_rollout import eval_sampling_params
from slime.rollout.sglang_rollout import GenerateState, get_model_url
from slime.servers.key_file import KEY_VARIABLE
from slime.utils.async_utils import run
from slime.utils.data import read_file
from slime.utils.types import Sample


class Keeper(Gateway):
    """Keeps finished sessions in ``items``; there is no sink."""

    def __init__(self, **options: Any) -> None:
        super().__init__(sink="", **options)
        self.items: list[dict[str, Any]] = []

    async def write(self, item: dict[str, Any]) -> None:
        self.items.append(item)


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> RolloutFnEvalOutput:
    """Return the agent's rewards on every data set, with the last sample of each session."""
    return run(_evaluate(args))


async def _evaluate(args: Any) -> RolloutFnEvalOutput:
    data = {}
    for config in args.eval_datasets:
        keeper = Keeper(
            tokenizer=GenerateState(args).tokenizer,
            sglang_url=get_model_url(args, "default", ""),
            tool_parser=args.sglang_tool_call_parser,
        )
        handle = await asyncio.to_thread(run_app_in_thread, keeper.app, host="127.0.0.1")
        try:
            rows = enumerate(read_file(config.path))
            tasks = "".join(
                task_line(row, config.input_key, config.label_key, str(number), config.n_samples_per_eval_prompt)
                for number, row in rows
            )
            command = agent_command(f"http://127.0.0.1:{handle.port}", eval_sampling_params(args, config))
            await _run_agent(command, tasks, keeper.key)
        finally:
            await asyncio.to_thread(handle.stop)
        samples = [sample_of(item) for item in sorted(keeper.items, key=lambda item: int(item["instance_id"]))]
        data[config.name] = {
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return RolloutFnEvalOutput(data=data)


async def _run_agent(command: list[str], tasks: str, key: str) -> None:
    """Let the agent's process do all ``tasks``. Raises RuntimeError, with its last words, when it fails."""
    pipe, environment = asyncio.subprocess.PIPE, {**os.environ, KEY_VARIABLE: key}
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=pipe
    )
    try:
        _, errors = await process.communicate(tasks.encode())
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        last = errors.decode(errors="replace")[-2000:]
        raise RuntimeError(f"the agent of the evaluation ended with exit status {process.returncode}: {last}")


def sample_of(item: dict[str, Any]) -> Sample:
    """Return the last sample of a session as the gateway wrote it; an empty one of a session without a turn."""
    number = int(item["instance_id"])
    sample = Sample(index=number, group_index=number, prompt=item["messages"][:-1], reward=item["reward"])
    sample.status = Sample.Status.COMPLETED
    if item["samples"]:
        last = item["samples"][-1]
        for name in ("tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "metadata"):
            setattr(sample, name, last[name])
        if last["metadata"].get("truncated"):
            sample.status = Sample.Status.TRUNCATED
    return sample
