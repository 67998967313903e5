"""The services that generation needs and slime does not run are checked once, before a run starts."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from slime.algorithms.reward_types import reward_type
from slime.arguments.args import Args
from slime.arguments.files.environments import environments_of
from slime.preflight.look import Findings
from slime.rollout.environments.environment import Environment
from slime.rollout.hooks.hook import in_thread, is_coroutine_function
from slime.rollout.outages import with_users_line
from slime.utils.misc import load_function

DEADLINE_S = 10.0
CONNECT_S = 3.0


def look_at_services(args: Args, dry_run: bool, found: Findings) -> None:
    """Report servers of rewards that take no connection, and what ``check`` of the environments raises."""
    if args.debug_train_only or args.load_debug_rollout_data is not None:
        return
    checked = {entry.name: entry for entry in environments_of(args).values() if _has_check(entry.path)}
    urls = set(_reward_urls(args))
    if dry_run:
        found.unchecked += [f"whether {url} answers (--rm-url)" for url in sorted(urls)]
        found.unchecked += [f"environment {name!r}: its check is made before a run" for name in checked]
        return
    for url in sorted(urls):
        found.begins(f"the connection to --rm-url {url}")
        if (why := _unreachable(url)) is not None:
            found.warnings.append(
                f"--rm-url {url} takes no connection ({why}): the run starts, and waits for it for "
                f"--service-outage-timeout {args.service_outage_timeout:g} s"
            )
    for name, entry in checked.items():
        found.begins(f"the check of environment {name!r}")
        try:
            asyncio.run(_check(load_function(entry.path), args, entry.options))
        except TimeoutError:
            found.errors.append(f"environment {name!r}: its check took more than {DEADLINE_S:g} s")
        except Exception as e:  # noqa: BLE001  (any error of a user's check is reported)
            found.errors.append(f"environment {name!r}: its check raised {with_users_line(e)}")


def _has_check(path: str) -> bool:
    own = inspect.getattr_static(load_function(path), "check", None)  # a method of the same name is another thing
    return isinstance(own, (classmethod, staticmethod)) and own is not Environment.__dict__["check"]


async def _check(kind: Any, args: Args, options: Mapping[str, Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        if is_coroutine_function(kind.check):
            await kind.check(args, options)
        else:
            await in_thread(kind.check, args, options)


def _reward_urls(args: Args) -> Iterator[str]:
    kinds = [args.rm_type, *(getattr(dataset, "rm_type", None) for dataset in args.eval_datasets)]
    asks = any(entry.needs_url for kind in kinds if (entry := reward_type(kind)))
    if asks and args.custom_rm_path is None and args.rm_url:
        yield args.rm_url


def _unreachable(url: str) -> str | None:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S):
            return None
    except (OSError, ValueError) as e:
        return str(e) or type(e).__name__
