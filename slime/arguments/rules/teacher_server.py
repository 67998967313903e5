"""Arguments of the Megatron log-prob server: a trainer that only answers, and learns nothing."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slime.arguments.errors import ArgumentError

_TRUE = ("true", "1", "yes", "y", "on")


def _switch(text: str) -> bool:
    return text.strip().lower() in _TRUE


# Attribute -> (environment variable that is its default, how it is read, what holds without it).
ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any], Any]] = {
    "teacher_port": ("TEACHER_PORT", int, 7999),
    "teacher_warmup_port": ("TEACHER_WARMUP_PORT", int, 7999),
    "teacher_warmup_timeout_s": ("TEACHER_WARMUP_TIMEOUT_S", int, 3000),
    "megatron_server_max_length": ("MEGATRON_SERVER_MAX_LENGTH", int, 0),
    "megatron_server_update_timeout_s": ("MEGATRON_SERVER_UPDATE_TIMEOUT_S", float, 3600.0),
    "megatron_server_warmup": ("MEGATRON_SERVER_WARMUP", _switch, True),
}
# What a server of log-probs is, whatever the command line says.
FORCED: dict[str, Any] = {
    "debug_train_only": True,
    "use_kl_loss": False,
    "offload_train": False,
    "use_dynamic_batch_size": False,
    "use_wandb": False,
    "kl_coef": 0,
    "use_opd": False,
    "use_critic": False,
    "keep_old_actor": False,
    "no_load_optim": True,
    "no_load_rng": True,
    "only_train_params_name_list": ["nothing_to_train"],
}
_POSITIVE = (
    "teacher_port",
    "teacher_warmup_port",
    "teacher_warmup_timeout_s",
    "teacher_sample_reduction_chunk_size",
    "teacher_label_reduction_chunk_size",
    "megatron_server_update_timeout_s",
)


def read_environment(args: Namespace) -> None:
    """Values that were not given come from the environment.

    A variable that cannot be read is left alone here: clusters set names like TEACHER_PORT for purposes of their own,
    so only a server rejects them.
    """
    _read(args, strict=False)


def configure_megatron_server_args(args: Namespace) -> Namespace:
    """Turn ``args`` into those of a server, in place, and return them.

    Raises ``ArgumentError`` (a ``ValueError``) for an environment variable that cannot be read.
    """
    _read(args, strict=True)
    for name, value in FORCED.items():
        setattr(args, name, list(value) if isinstance(value, list) else value)
    return args


def _read(args: Namespace, *, strict: bool) -> None:
    given: frozenset[str] = args.explicit_flags
    for name, (variable, read, default) in ENVIRONMENT.items():
        if name in given:
            continue
        if getattr(args, name, None) is None:
            setattr(args, name, default)
        text = os.environ.get(variable, "")
        try:
            setattr(args, name, read(text) if text else getattr(args, name))
        except ValueError as error:
            if strict:
                raise ArgumentError(
                    f"the environment variable {variable} is {text!r}, expected "
                    f"{'an integer' if read is int else 'a number'}; unset it or give --{name.replace('_', '-')}"
                ) from error


def validate_megatron_server_args(args: Namespace) -> None:
    """Raise ``ArgumentError`` (a ``ValueError``) for arguments with which a server would train, or could not serve."""
    for name, value in FORCED.items():
        if getattr(args, name) != value:
            raise ArgumentError(f"a log-prob server needs {name} to be {value!r}, got {getattr(args, name)!r}")
    for name in _POSITIVE:
        if getattr(args, name) <= 0:
            raise ArgumentError(f"--{name.replace('_', '-')}: expected a number above 0, got {getattr(args, name)}")
    if args.megatron_server_max_length < 0:
        raise ArgumentError(
            f"--megatron-server-max-length: expected 0 (no limit) or more, got {args.megatron_server_max_length}"
        )
