"""Recognize secrets: by the name of a setting, by the form of a value, and by the values that this process knows.

Names are read as words (``judge_token``, ``openai-key``, ``accessKey``), so that ``max_tokens``, ``tokenizer``,
``eval_input_key`` and ``keyword`` are none. In a text on any subject, passwords of URLs, secret parameters,
assignments and options, and the well-known forms of keys are found wherever they stand.
"""

from __future__ import annotations

import contextlib
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

MASK = "***"
PASSED = "SLIME_PASS_SECRETS"
"""Names, with commas between them, of secret variables that every process of the run gets."""

_ANYWHERE = (
    "secret",
    "password",
    "passwd",
    "passphrase",
    "credential",
    "apikey",
    "token_file",
    "_db_url",
    "connection_string",
    "authorization",
)
_LAST = {"auth", "jwt", "cookie", "private", "pat", "dsn"}
_OF_TEXT = re.compile(
    "eos|bos|pad|unk|cls|sep|mask|image|video|audio|first|last|next|each|every|per|stop|special|new|end|start|begin|max|"
    "min|num|think|tool|prompt|response|draft|space|newline"
)
"""Before ``token``: of a language model."""
_KEYS = re.compile(
    "api|access|private|secret|admin|wandb|auth|ssh|encryption|signing|account|master|service|storage|openai|anthropic|"
    "hf|huggingface|aws|azure|gcp|google|gemini|deepseek|cohere|mistral|groq|together|tavily|serper|serpapi|e2b|judge|"
    "license|subscription|bearer"
)
"""Before ``key``; other keys are names of columns and fields, unless they are written as environment variables are."""
_ACCOUNTS = re.compile("db|user|smtp|imap|root|admin|redis|mysql|pg|postgres|proxy|http|ssh|ftp")
"""Before ``pass``."""


@lru_cache(maxsize=8192)
def is_secret(name: str) -> bool:
    """True when the setting ``name`` (an attribute, a flag, a variable) holds a key, a token or a password."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = [word for word in re.split(r"[^a-z0-9]+", snake) if word and not word.isdigit()]
    text = "_".join(words)
    if any(part in text for part in _ANYWHERE):
        return name != PASSED
    pairs = list(zip(["", *words], words, strict=False))
    if any(word in ("key", "keys") and before in ("api", "admin", "wandb") for before, word in pairs):
        return True
    before, last = pairs[-1] if pairs else ("", "")
    if last in ("key", "keys"):
        return bool(_KEYS.fullmatch(before)) or (name.isupper() and before not in ("", "public"))
    if last in ("token", "tokens"):
        return bool(_KEYS.fullmatch(before)) if last == "tokens" else not _OF_TEXT.fullmatch(before)
    if last in ("pwd", "pw"):
        return before != ""
    if last == "pass":
        return name.isupper() or bool(_ACCOUNTS.fullmatch(before))
    return last in _LAST


_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\beyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*"
    r"|\b(?:hf_|gsk_|npm_|glpat-|nvapi-|pypi-|r8_|xai-|dop_v1_|gh[pousr]_|github_pat_|tvly-|e2b_|pplx-)[\w-]{16,}"
    r"|\bsk-[\w-]{12,}|\bxox[abeoprs]-[\w-]{10,}|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{30,}"
    r"|(?<=hooks\.slack\.com/services/)[\w/]+|(?<=/api/webhooks/)\d+/[\w-]+"
)
_USERINFO = re.compile(r"(?<=://)(?:[^\s/?#\"'<>\\]+|[^\s/?#@\"'<>\\:]*:(?!\d+(?:[/?#]|\Z))[^\s@\"'<>\\]+)@")
_BEARER = re.compile(r"\b([Bb]earer|[Bb]asic(?=\s+\S*[A-Z0-9=]))(\s+)(?!\*\*\*)[\w.~+/=-]{8,}")
_PAIR = re.compile(
    # the name begins where a word does: else every place in a long word would be tried as its beginning
    r"(?P<before>(?P<quote>\\?[\"']?)(?<![\w.-])(?P<name>[\w.-]+)(?P=quote)(?:\s?=\s?|:(?!//)\s?))"
    r"(?P<value>\\?\"(?:[^\"\\]|\\[^\"])*\\?\"|'[^']*'|[^\s&;,\"'{}\[\]]+)"
)
_OPTION = re.compile(r"(?P<before>(?<!\S)--(?P<name>[A-Za-z][\w-]*)\s+)(?P<value>\"[^\"]*\"|'[^']*'|(?!-)\S+)")
_PARAMETERS = re.compile(r"(?<=[?&])(key|sig|signature|token|auth)=[^\s&#\"']+", re.IGNORECASE)
_HINT = re.compile(
    r"key|token|secret|pass|pwd|cred|auth|jwt|cookie|private|pat\b|dsn|_db_url|sig|bearer|basic", re.IGNORECASE
)
_RANDOM = re.compile(r"(?=(?:\D*\d){2})(?=.*[A-Za-z])[A-Za-z0-9+/=]{20,}")
_SHORTEST = 6
_STAND_INS = {"default", "disabled", "enabled", "offline", "online", "unused", "anonymous", "localhost", "dummy-key"}
_known: set[str] = set()


def remember(source: Namespace | Mapping[str, Any]) -> None:
    """The values of secrets in ``source``, at every depth, are secret wherever they appear from now on.

    So are those of the environment as it is now.
    """
    _known.update(filter(_is_telling, _values(source)))
    _pattern.cache_clear()


def _is_telling(value: str) -> bool:
    """Return True if a text that holds ``value`` most likely means it: no path, and no placeholder of a missing key."""
    is_path = _is_path(value) or (value.startswith("/") and _RANDOM.fullmatch(value) is None)
    return len(value) >= _SHORTEST and not is_path and value.lower() not in _STAND_INS


def _values(source: object, inside: bool = False) -> Iterator[str]:
    if isinstance(source, Namespace):
        source = vars(source)
    if isinstance(source, Mapping):
        for name, value in source.items():
            yield from _values(value, inside or is_secret(str(name)))
    elif isinstance(source, list | tuple):
        for value in source:
            yield from _values(value, inside)
    elif inside and isinstance(source, str):
        yield source


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    remembered = _known | set(filter(_is_telling, _values(dict(os.environ))))
    longest_first = sorted(remembered, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def mask_text(text: str, name: str = "") -> str:
    """``text``, the value of ``name``, with the secrets in it masked."""
    if name.rpartition("_")[2] in ("key", "keys") and _RANDOM.fullmatch(text):
        return MASK
    text = _FORMS.sub(MASK, _pattern().sub(MASK, text))
    if "@" in text:
        text = _USERINFO.sub(f"{MASK}@", text)
    if _HINT.search(text) is None:  # most texts
        return text
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _PARAMETERS.sub(rf"\1={MASK}", text)
    return _OPTION.sub(_masked, _PAIR.sub(_masked, text))


def public_environment() -> dict[str, str]:
    """The environment of this process without secrets, for those that it starts.

    What Ray itself reads stays, and so does what ``PASSED`` names, and the path of a file of credentials.
    """
    passed = os.environ.get(PASSED, "").split(",")
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("RAY_") or name in passed or _is_path(value) or not is_secret(name)
    }


def _is_path(value: str) -> bool:
    """Return True if ``value`` names an existing file: a secret may begin with a slash too."""
    return value.startswith("/") and os.path.exists(value)


def mask_words(words: Iterable[str]) -> list[str]:
    """The words of a command line with the secrets in them masked: all values of an option that is one."""
    found, masks = [], False
    for word in words:
        if word.startswith("--"):
            option, equals, _ = word.partition("=")
            masks = is_secret(option) and not equals
            found.append(f"{option}={MASK}" if equals and is_secret(option) else mask_text(word))
        else:
            found.append(MASK if masks else mask_text(word))
    return found


def hide_command_line() -> None:
    """Mask the secrets in what ``ps`` shows of this process, where the kernel lets it."""
    with contextlib.suppress(OSError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            words = (memory.read(end - start) or b"").split(b"\0")
            shown = [os.fsencode(word) for word in mask_words(map(os.fsdecode, words))]
            memory.seek(start)
            memory.write(
                b"\0".join(mask.ljust(len(word), b"*")[: len(word)] for mask, word in zip(shown, words, strict=True))
            )


def _masked(match: re.Match[str]) -> str:
    value = match["value"]
    if not is_secret(match["name"]) or value.strip("\"'\\") in (
        "",
        MASK,
        "None",
        "null",
        "true",
        "false",
        "True",
        "False",
    ):
        return match[0]
    opening = re.match(r"\\?[\"']?", value)
    quote = opening[0] if opening else ""
    return f"{match['before']}{quote}{MASK}{quote}"
