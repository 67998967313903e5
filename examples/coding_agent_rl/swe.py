"""Steps of a task in its sandboxes: prepare the repository, read the change, apply and grade it in another sandbox."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.coding_agent_rl import swe_bench
from slime.agent.sandbox import Sandbox, exec_and_wait
from slime.utils.types import Sample

STATEMENT = "PROBLEM_STATEMENT.md"
NOT_OF_THE_CHANGE = (STATEMENT, ".harness")
SWE_PROMPT = os.environ.get("SWE_CC_PROMPT") or (
    f"The repository in {{workdir}} has a problem, described in {STATEMENT}:\n\n{{problem_statement}}\n\n"
    "Find the cause and fix it in the repository's own code. Leave its tests as they are, and do not commit."
)
Metadata = Mapping[str, Any]
_LADDER = "git apply --3way {0} || git apply {0} || patch -p1 --forward < {0}"
_EXIT_S = 120


@dataclass(frozen=True)
class EvalResult:
    """The score, 1.0 if the change solves the task, else 0.0, and whether it could be applied at all."""

    reward: float
    applied_cleanly: bool


def get_metadata(sample: Sample) -> dict[str, Any]:
    """Return the fields of a task; those of ``remote_env_info``, where there is one, fill what is missing.

    Of SWE-bench's tasks these are all fields, and where the image and its repository are is known.
    """
    given = dict(sample.metadata or {})
    remote = given.get("remote_env_info") or {}
    if swe_bench.is_instance({**remote, **given}):
        found = {"workdir": swe_bench.WORKDIR, **remote, **given}
        return {**found, "image": found.get("image") or swe_bench.image_of(found["instance_id"])}
    fields = ("workdir", "instance_id", "f2p_script", "pre_commands", "problem_statement")
    filled = {name: remote[name] for name in fields if name in remote}
    return {"image": remote.get("image_url"), **filled, **given}


def evaluability_check(metadata: Metadata) -> str | None:
    """Return why a task cannot be tried or graded, None when it can.

    Raises ModuleNotFoundError for a task of SWE-bench where its package is not installed.
    """
    if not metadata.get("image") or not metadata.get("workdir"):
        return "missing_image_or_workdir"
    if swe_bench.is_instance(metadata):
        swe_bench.harness()
    elif not any(metadata.get(name) for name in ("swepro", "eval_cmd", "f2p_script")):
        return "unevaluatable:no_grader"
    return None


async def apply_pre_commands(sb: Sandbox, metadata: Metadata) -> None:
    """Run ``pre_commands``, a text or a list, in a shell; each must succeed."""
    commands = metadata.get("pre_commands") or []
    for command in [commands] if isinstance(commands, str) else commands:
        await sb.exec(command, check=True, timeout=600)


async def apply_before_repo_set_cmd(sb: Sandbox, metadata: Metadata) -> None:
    """Run ``swepro.before_repo_set_cmd`` in the repository, where there is one."""
    if command := (metadata.get("swepro") or {}).get("before_repo_set_cmd"):
        await sb.exec(f"cd {shlex.quote(metadata['workdir'])} && {command}", check=True, timeout=600)


async def prepare_workspace(sb: Sandbox, metadata: Metadata) -> None:
    """Bring the repository into the state that the agent starts from, and write the statement into it."""
    await apply_before_repo_set_cmd(sb, metadata)
    await apply_pre_commands(sb, metadata)
    await sb.write_file(f"{metadata['workdir']}/{STATEMENT}", metadata["problem_statement"])


async def git_diff(sb: Sandbox, workdir: str) -> str:
    """Return what the agent changed, new files included, without what is ours."""
    left_out = " ".join(shlex.quote(f":(exclude){name}") for name in NOT_OF_THE_CHANGE)
    command = f"cd {shlex.quote(workdir)} && git add -N . && git diff --binary HEAD -- . {left_out}"
    return (await sb.exec(command, check=True, timeout=_EXIT_S))[1]


async def run_evaluation(sb: Sandbox, metadata: Metadata, diff: str, timeout_sec: float) -> EvalResult:
    """Apply ``diff`` in a fresh sandbox and grade it: by SWE-bench, ``swepro``, ``eval_cmd`` or ``f2p_script``.

    An empty change counts as applied. The reward is 1 when all tests that SWE-bench or ``swepro`` requires pass, or
    when the command ends with 0 within the time.
    """
    ladder = swe_bench.LADDER if swe_bench.is_instance(metadata) else _LADDER
    await apply_before_repo_set_cmd(sb, metadata)
    await apply_pre_commands(sb, metadata)
    workdir = shlex.quote(metadata["workdir"])
    if diff.strip():
        await sb.write_file("/tmp/change.diff", diff)
        code, _, _ = await sb.exec(f"cd {workdir} && ({ladder.format('/tmp/change.diff')})", timeout=_EXIT_S)
        if code != 0:
            return EvalResult(0.0, applied_cleanly=False)
    if swe_bench.is_instance(metadata):
        solved = await swe_bench.is_resolved(sb, metadata, diff, timeout_sec)
        return EvalResult(float(solved), applied_cleanly=True)
    if metadata.get("swepro"):
        return EvalResult(float(await _swepro(sb, metadata, timeout_sec)), applied_cleanly=True)
    command = metadata.get("eval_cmd")
    if not command:
        await sb.write_file("/tmp/f2p.sh", metadata["f2p_script"])
        command = "bash /tmp/f2p.sh"
    code, _ = await exec_and_wait(
        sb, cmd=command, time_budget_sec=timeout_sec, tag="grade", workdir=metadata["workdir"]
    )
    return EvalResult(float(code == 0), applied_cleanly=True)


async def _swepro(sb: Sandbox, metadata: Metadata, timeout_sec: float) -> bool:
    """Return whether the required tests are among those that the task's own parser finds passed in its own run."""
    own = metadata["swepro"]
    for name in ("run_script", "parser_script"):
        await sb.write_file(f"/tmp/{name}", Path(own[f"{name}_path"]))
    files = ",".join(own.get("selected_test_files") or [])
    run = f"bash /tmp/run_script {shlex.quote(files)} > /tmp/tests.out 2> /tmp/tests.err"
    parse = "python3 /tmp/parser_script /tmp/tests.out /tmp/tests.err /tmp/tests.json"
    code, _ = await exec_and_wait(
        sb, cmd=f"{run}; {parse}", time_budget_sec=timeout_sec, tag="grade", workdir=metadata["workdir"]
    )
    if code != 0:
        return False
    report = json.loads(await sb.read_file("/tmp/tests.json"))
    passed = {test["name"] for test in report["tests"] if test["status"] == "PASSED"}
    return {*own.get("fail_to_pass", ()), *own.get("pass_to_pass", ())} <= passed
