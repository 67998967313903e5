"""The destinations of metrics: a JSON-lines file in the run directory, TensorBoard event files, Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.observability.best_effort import Lines
from slime.observability.tracking import STEP_AXES, is_scalar, tensorboard_dir
from slime.utils.atomic_file import FULL, space_left
from slime.utils.declared import with_defaults
from slime.utils.misc import SingletonMeta
from slime.utils.plain import plain
from slime.utils.run_state import record

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy ``config`` as plain data with keys, tokens and passwords masked, at every depth."""
    return {k: plain(k, v) for k, v in config.items()}


class JsonlWriter:
    """Appends one line per metric to ``path``: ``{"step_key", "step", "name", "value", "time"}``.

    Values that JSON cannot hold (NaN and the infinities) are written as strings that ``float()`` reads.
    Each batch is written at once, so that a killed run loses nothing that it reported; on a full disk it waits.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lines = Lines("metrics", self.path)

    def write(self, step_key: str, step: int, metrics: Mapping[str, Any], timestamp: float) -> None:
        """Append ``metrics``; non-numeric ones are left to the trackers that can show them."""
        lines = []
        for name, value in metrics.items():
            if not is_scalar(value):
                continue
            value = value if isinstance(value, (bool, int)) else float(value)
            if isinstance(value, float) and not math.isfinite(value):
                value = str(value)
            line = {"step_key": step_key, "step": step, "name": name, "value": value, "time": round(timestamp, 3)}
            lines.append(json.dumps(line) + "\n")
        self._lines.write("".join(lines).encode())

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


class TensorBoardWriter:
    """Writes scalars to TensorBoard event files in ``log_dir`` (without importing torch).

    A file that cannot be written is followed by another, with what is logged when there is room again.
    """

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self._events: Any = None
        try:
            self._open()
        except OSError as e:
            if e.errno not in FULL:
                raise
            logger.warning("%s: TensorBoard has no file yet: %s%s", log_dir, e, space_left(Path(log_dir).absolute()))

    def _open(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._events is None:
            os.makedirs(self._log_dir, exist_ok=True)
            self._events = EventFileWriter(self._log_dir)
        return self._events

    def write(self, step_key: str, step: int, metrics: Mapping[str, Any], timestamp: float) -> None:
        """Add one event that holds all numbers of ``metrics``."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=n, simple_value=float(v)) for n, v in metrics.items() if is_scalar(v)]
        try:
            self._open().add_event(Event(wall_time=timestamp, step=step, summary=Summary(value=values)))
        except Exception:
            self._events = None
            raise

    def close(self) -> None:
        """Flush and close the event file."""
        if self._events is not None:
            self._events.flush()
            self._events.close()


def _names(args: Args) -> tuple[str | None, ...]:
    """Return the values that name the directory of event files."""
    return os.environ.get("TENSORBOARD_DIR"), args.tb_project_name, args.tb_experiment_name


class _TensorboardAdapter(metaclass=SingletonMeta):
    """Curves of plug-ins that write their own, beside those of the run: one event file per process.

    It is in the directory of ``--tb-project-name`` (see ``tensorboard_dir``).

    Raises ValueError without ``--use-tensorboard``.
    """

    def __init__(self, args: Args) -> None:
        args = with_defaults(args)
        if not args.use_tensorboard:
            raise ValueError("_TensorboardAdapter writes event files only with --use-tensorboard")
        self._named = _names(args)
        self._writer = TensorBoardWriter(tensorboard_dir(args))

    def serves(self, args: Args) -> bool:
        """Return True if ``args`` name the directory of this one."""
        return _names(with_defaults(args)) == self._named

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Add the numbers of ``data`` at ``step``."""
        self._writer.write("step", step, data, time.time())

    def finish(self) -> None:
        """Flush and close the file."""
        self._writer.close()


class WandbWriter:
    """Logs to Weights & Biases; ``--wandb-mode offline`` (or ``WANDB_MODE``) needs neither account nor network."""

    def __init__(self, args: Args) -> None:
        import wandb

        mode: Any = args.wandb_mode or os.environ.get("WANDB_MODE") or "online"
        host = args.wandb_host
        if mode == "online" and args.wandb_key:
            wandb.login(key=args.wandb_key, host=host)
        group = args.wandb_group
        name = group
        if group and args.wandb_random_suffix:
            group = f"{group}_{uuid.uuid4().hex[:8]}"
            name = f"{group}-RANK_{args.rank or 0}"
        directory = args.wandb_dir
        if directory:
            os.makedirs(directory, exist_ok=True)
        self._run = wandb.init(
            entity=args.wandb_team,
            project=args.wandb_project or "slime",
            group=group,
            name=name,
            id=args.wandb_run_id,
            resume="allow" if args.wandb_run_id else None,
            dir=directory,
            mode=mode,
            config=wandb_config(args),
            settings=wandb.Settings(base_url=host) if host else None,
        )
        record(args, wandb_run_id=self._run.id)  # plug-ins and a later --wandb-run-id refer to it
        for step_key, prefixes in STEP_AXES.items():
            self._run.define_metric(step_key)
            for prefix in prefixes:
                self._run.define_metric(f"{prefix}*", step_metric=step_key)

    def write(self, step_key: str, step: int, metrics: Mapping[str, Any], timestamp: float) -> None:
        """Log ``metrics`` together with their step; W&B draws each prefix over its own axis."""
        self._run.log({step_key: step, **metrics})

    def close(self) -> None:
        """Finish the run and end W&B's helper process, which would otherwise run as long as this one."""
        import wandb

        self._run.finish()
        wandb.teardown()


def wandb_config(args: Args) -> dict[str, Any]:
    """Return what the W&B page shows as the configuration: all arguments (no secrets), the Slurm job, the roles'."""
    run = {k: v for k, v in vars(args).items() if k != "role_values"}
    config: dict[str, Any] = without_secrets(run)
    config["env_vars"] = {"SLURM_JOB_ID": os.environ.get("SLURM_JOB_ID")}
    for role, values in args.role_values.items():
        config.update({f"{role}/{k}": v for k, v in without_secrets({**run, **values}).items()})
    return config
