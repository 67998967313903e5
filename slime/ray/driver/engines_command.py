"""``slime engines``: the engines of a run in progress, and changes of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from slime.ray import cluster
from slime.ray.remote import one_line_kind

if TYPE_CHECKING:
    from slime.ray.remote import RemoteActor

ANSWER_TIMEOUT_S = 1800.0
"""Time for the manager's answer beside ``--timeout``; while the run starts, it answers when the engines are ready."""
COLUMNS = ("model", "router", "engine", "url", "type", "slots", "state")


def change_engines(words: Sequence[str]) -> int:
    """Execute the command line ``words``; return the exit status: 1 when it cannot be done."""
    asked = parser().parse_args(words)
    try:
        manager = cluster.manager_of_run(asked.run_dir)
        print(_answer(manager, asked), flush=True)
    except (ConnectionError, ray.exceptions.RayError) as e:
        print(
            f"slime engines: error: {one_line_kind(e) if isinstance(e, ray.exceptions.RayError) else e}",
            file=sys.stderr,
        )
        return 1
    finally:
        ray.shutdown()
    return 0


def _answer(manager: RemoteActor, asked: argparse.Namespace) -> str:
    timeout_s = ANSWER_TIMEOUT_S + (getattr(asked, "timeout", None) or 0.0)

    def call(method: str, *args: object) -> Any:
        try:
            return ray.get(getattr(manager, method).remote(*args), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise ConnectionError(
                f"the manager of the run in {asked.run_dir} has not answered for {timeout_s:g} s. What was asked for "
                "may still be done: look with `slime engines list`, and at the log of the manager in that directory"
            ) from None

    if asked.action == "list":
        return table(call("deployment"))
    if asked.action == "add":
        ranks = call("add_engines", asked.model, asked.count, asked.worker_type)
        return f"being started: {_names(ranks)}"
    aborted = call(f"{asked.action}_engines", asked.engine, asked.timeout)
    done = "drained" if asked.action == "drain" else "removed"
    resent = f"; {aborted} requests were aborted, and are sent to the others" if aborted else ""
    return f"{done}: {_names(asked.engine)}{resent}"


def table(deployment: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the routers and engines of ``EngineControl.deployment`` as lines of text."""
    rows = [COLUMNS]
    for name, model in deployment.items():
        router = (name, model["router"])
        for engine in model["engines"]:
            values = (engine[key] for key in ("rank", "url", "worker_type", "slots", "state"))
            rows.append((*router, *("-" if value is None else str(value) for value in values)))
            router = ("", "")
        if not model["engines"]:
            rows.append((*router, "none", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"engine {rank}" for rank in ranks)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the words after ``slime engines``."""
    made = argparse.ArgumentParser(prog="slime engines", description=__doc__, allow_abbrev=False)
    actions = made.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (
        ("list", "show routers, engines and their state"),
        ("add", "start more engines; of a model that is trained they get requests after the next push of weights"),
        ("drain", "send no more requests to engines; they run on until they are removed"),
        ("remove", "drain engines and end them; their slots are free then"),
    ):
        action = actions.add_parser(name, help=what, description=what, allow_abbrev=False)
        action.add_argument("--run-dir", type=Path, required=True, help="directory of the run")
        if name == "add":
            action.add_argument("--model", help="name of the model; default: the first")
            action.add_argument("--count", type=_positive, default=1, help="how many engines; default: 1")
            action.add_argument("--worker-type", help="regular, prefill, decode; default: that of the first engine")
        elif name != "list":
            action.add_argument("engine", type=int, nargs="+", help="number of an engine, as `list` shows it")
            action.add_argument(
                "--timeout", type=float, metavar="S",
                help="seconds that its requests have to end before they are aborted and sent to others; default: "
                "--drain-timeout of the run",
            )  # fmt: skip
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number
