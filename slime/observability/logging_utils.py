"""Logging set-up and the one call through which every metric goes: ``log(args, metrics, step_key)``."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.observability.best_effort import Files
from slime.observability.tracking import Writer, get_tracker, tensorboard_dir, to_records
from slime.observability.writers import JsonlWriter, TensorBoardWriter, WandbWriter
from slime.utils.atomic_file import open_private
from slime.utils.declared import with_defaults
from slime.utils.run_state import record
from slime.utils.secrets import mask_text

if TYPE_CHECKING:
    from slime.arguments.args import Args

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
