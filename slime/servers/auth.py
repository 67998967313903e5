"""The key that engines and routers ask for when others can reach them."""

from __future__ import annotations

import ipaddress
import secrets
from argparse import Namespace


def is_loopback(host: str) -> bool:
    """True when only processes of the same host can reach a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def ensure_api_key(args: Namespace, host: str) -> str | None:
    """Return the run's API key, generating one when servers bind ``host`` beyond loopback and none was given.

    The key is kept in ``args.sglang_api_key``, from where engines, routers and clients take it. SGLang's weight
    endpoints unpickle request bodies: anyone who reaches an engine without a key can run code on it.
    ``--sglang-admin-api-key`` does not cover all of those endpoints, ``--sglang-api-key`` covers everything but health
    and metrics.
    """
    key: str | None = args.sglang_api_key
    if key is None and not is_loopback(host):
        key = secrets.token_urlsafe(32)
        args.sglang_api_key = key
    return key
