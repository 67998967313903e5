"""Logging set-up; the one call through which metrics go, ``log(args, metrics, step_key)``; and their destinations."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.observability.best_effort import Files, Lines
from slime.observability.tracking import STEP_AXES, Writer, get_tracker, is_scalar, tensorboard_dir, to_records
from slime.utils.atomic_file import FULL, open_private, space_left
from slime.utils.declared import with_defaults
from slime.utils.misc import SingletonMeta
from slime.utils.plain import plain
from slime.utils.run_state import record
from slime.utils.secrets import mask_text

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)

FORMAT = "[%(asctime)s%(prefix)s] %(levelname)s %(name)s:%(lineno)d - %(message)s"
TRACKERS = "trackers.json"
"""In the run directory: the W&B run and the TensorBoard directory of the run."""
_OWN = "_slime_handler"


class _Prefix(logging.Filter):
    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = f" {prefix}" if prefix else ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.prefix = self.prefix
        return True


class MaskingFormatter(logging.Formatter):
    """Masks the secrets in a record, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_text(super().format(record))


def configure_logger(prefix: str = "", *, log_file: str | Path | None = None, level: int = logging.INFO) -> None:
    """Send log records of this process to stderr and, when given, to ``log_file`` (appended).

    ``prefix`` names the process (``actor rank 0``). Calling again replaces what an earlier call set up and leaves
    handlers of others (pytest's, a notebook's) alone.
    """
    root = logging.getLogger()
    for handler in [h for h in root.handlers if getattr(h, _OWN, False)]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        os.close(open_private(log_file))
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
    for handler in handlers:
        setattr(handler, _OWN, True)
        handler.addFilter(_Prefix(prefix))
        handler.setFormatter(MaskingFormatter(FORMAT, "%Y-%m-%d %H:%M:%S"))
        root.addHandler(handler)
    root.setLevel(level)
    # httpx and friends log every request at INFO: thousands of lines per rollout
    for noisy in ("httpx", "httpcore", "urllib3", "asyncio", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def init_tracking(args: Args, primary: bool = True) -> None:
    """Open the trackers that ``args`` asks for.

    With ``primary`` (the driver) metrics go to ``<run_dir>/metrics.jsonl`` (when ``args.run_dir`` is set),
    TensorBoard (``--use-tensorboard``) and W&B (``--use-wandb``), to the W&B run and the directory of earlier starts in
    the same ``args.run_dir``. Otherwise they are buffered until the owner of this
    process drains them (:func:`slime.observability.tracking.drain`).
    """
    args = with_defaults(args)
    if not primary:
        return
    tracker = get_tracker()
    if tracker.is_primary:
        raise RuntimeError("init_tracking was called twice in this process; call finish_tracking in between")
    writers: list[Writer] = []
    kept = _trackers_of(args.run_dir)
    try:
        if args.run_dir:
            writers.append(JsonlWriter(Path(args.run_dir) / "metrics.jsonl"))
        if args.use_tensorboard:
            kept.setdefault("tensorboard_dir", tensorboard_dir(args))
            writers.append(TensorBoardWriter(os.environ.get("TENSORBOARD_DIR") or kept["tensorboard_dir"]))
        if args.use_wandb:
            project = kept.setdefault("wandb_project", args.wandb_project)
            if args.wandb_run_id is None and project == args.wandb_project:
                record(args, wandb_run_id=kept.get("wandb_run_id"))
            writers.append(WandbWriter(args))
            kept |= {"wandb_project": args.wandb_project, "wandb_run_id": args.wandb_run_id}
        if kept and args.run_dir:
            Files("the ids of the trackers").write(Path(args.run_dir) / TRACKERS, (json.dumps(kept) + "\n").encode())
    except BaseException:  # W&B may wait for long, and be interrupted
        for writer in writers:
            writer.close()
        raise
    tracker.open(writers)


def _trackers_of(run_dir: str | None) -> dict[str, Any]:
    """Return where an earlier start of the run in ``run_dir`` has logged to: a resumed run is one run there, too."""
    try:
        kept: dict[str, Any] = json.loads((Path(run_dir or os.devnull) / TRACKERS).read_text())
    except (OSError, ValueError):
        return {}
    return kept


def finish_tracking(args: Args | None = None, *, complete: bool = True) -> None:
    """Flush and close the trackers of this process. Safe to call without ``init_tracking``.

    With ``complete`` metrics that other processes of the run still hold are fetched and written before. ``args`` is
    part of the public signature, as in ``log``.
    """
    del args
    get_tracker().close(complete=complete)


def log(args: Args | None, metrics: Mapping[str, Any], step_key: str) -> None:
    """Log ``metrics``, which hold their own step under ``step_key`` (``train/step``, ``rollout/step``, ``eval/step``).

    Values are numbers (0-d tensors and arrays are converted); other values reach W&B only. ``args`` is part of the
    public signature; destinations are chosen by :func:`init_tracking`.
    """
    args = with_defaults(args)
    get_tracker().add(to_records(metrics, step_key))


# The destinations of metrics


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
