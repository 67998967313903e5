"""The keys that engines and routers ask for."""

from __future__ import annotations

import hmac
import ipaddress
import secrets

from slime.arguments.args import Args
from slime.utils.run_state import record


def is_loopback(host: str) -> bool:
    """True when only processes of the same host can reach a server bound to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def ensure_api_key(args: Args, host: str | None = None) -> str:
    """Return the run's API key, which is made here unless the user has given one (``--sglang-api-key``).

    It is kept in ``args.sglang_api_key``, from where engines, routers and clients take it, and so is the second one,
    ``args.sglang_admin_api_key``, that engines ask for where weights are read or written: those endpoints load files
    and unpickle request bodies. There is a key on loopback too: other users of the host, and agents in a sandbox, reach
    servers there. ``host`` is not looked at.
    """
    # Hexadecimal: SGLang reads its keys as words of a command line, where one that begins with a dash is a flag.
    key = secrets.token_hex(32) if args.sglang_api_key is None else args.sglang_api_key
    record(args, sglang_api_key=key)
    if args.sglang_admin_api_key is None:
        record(args, sglang_admin_api_key=secrets.token_hex(32))
    return key


def is_key(given: str | None, key: str) -> bool:
    """True when ``given`` is ``key``, compared in a time that reveals nothing of the key."""
    return given is not None and hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())


def bearer_token(authorization: str | None) -> str | None:
    """Return the token in the value of an ``Authorization`` header, if it has one."""
    kind, _, token = (authorization or "").strip().partition(" ")
    return token.strip() or None if kind.lower() == "bearer" else None
