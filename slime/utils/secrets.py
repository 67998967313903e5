"""Which settings are secret: their values are written nowhere."""

from __future__ import annotations

from functools import lru_cache

MASK = "***"
WORDS = ("api_key", "wandb_key", "admin_key", "secret", "password", "auth_token", "hf_token", "token_file", "_db_url")


@lru_cache(maxsize=8192)
def is_secret(name: str) -> bool:
    """True when the setting ``name`` (an attribute or a flag) holds a key, a token or a password."""
    plain = name.lower().replace("-", "_")
    return any(word in plain for word in WORDS)
