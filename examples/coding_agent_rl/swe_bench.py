"""Tasks of SWE-bench: an image for each instance, graded by the tests that must pass (``FAIL_TO_PASS``) and those that
must continue to pass (``PASS_TO_PASS``). What is run, and how its log is read, is the package ``swebench``'s.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, Sandbox, exec_and_wait

WORKDIR = "/testbed"
LADDER = "git apply --verbose {0} || git apply --verbose --reject {0} || patch --batch --fuzz=5 -p1 -i {0}"
_LOG = "/tmp/tests.log"
Metadata = Mapping[str, Any]


def is_instance(metadata: Metadata) -> bool:
    """True for a task of SWE-bench."""
    return bool(metadata.get("FAIL_TO_PASS"))


def image_of(instance_id: str) -> str:
    """Return the published image of an instance."""
    return f"swebench/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def harness() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return ``make_test_spec`` and ``get_eval_report`` of the installed swebench, before or since its version 5.

    Raises ModuleNotFoundError without the package.
    """
    try:
        from swebench.harness.grading import get_eval_report
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != "swebench":  # something that it needs
            raise
        raise ModuleNotFoundError(
            "tasks with FAIL_TO_PASS are graded by the package swebench, which is not installed: pip install swebench",
            name=e.name,
        ) from e
    try:
        from swebench.harness.test_spec.test_spec import make_test_spec
    except ModuleNotFoundError:
        from swebench.harness.utils import make_test_spec
    return make_test_spec, get_eval_report


async def is_resolved(sb: Sandbox, metadata: Metadata, diff: str, timeout_sec: float) -> bool:
    """Run the instance's tests where ``diff`` was applied; return whether all that are required pass, in time.

    Raises RuntimeError where swebench finds that the tests could not run.
    """
    make_test_spec, get_eval_report = harness()
    spec, name = make_test_spec(dict(metadata)), metadata["instance_id"]
    await sb.write_file("/tmp/tests.sh", spec.eval_script)
    code, _ = await exec_and_wait(
        sb, cmd=f"bash /tmp/tests.sh > {_LOG} 2>&1", time_budget_sec=timeout_sec, tag="grade",
        workdir=metadata["workdir"],
    )  # fmt: skip
    if code == EXIT_TIME_BUDGET_EXCEEDED:
        return False
    prediction = {"instance_id": name, "model_name_or_path": "slime", "model_patch": diff}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "tests.log"
        log.write_text(await sb.read_file(_LOG), encoding="utf-8")
        report = get_eval_report(spec, prediction, str(log), include_tests_status=False)[name]
    if report.get("infra_failure"):
        raise RuntimeError(f"the tests of {name} could not run: {report.get('infra_failure_reason')}")
    return bool(report["resolved"])
