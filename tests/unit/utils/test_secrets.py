"""Secrets are found by name, by form and by value, and nothing else is taken for one."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.arguments.command_line import all_flags
from slime.utils import secrets
from slime.utils.plain import plain
from slime.utils.secrets import MASK, is_secret, mask_text, mask_words, remember

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.SflKxwRJSMeKKF2QT4fwpMeJf36POk6yJV_adQssw5c"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    secrets._pattern.cache_clear()


@pytest.mark.parametrize(
    "name",
    ["wandb_key", "sglang_api_key", "sglang_admin_api_key", "--router-control-plane-api-keys", "HF_TOKEN",
     "router_oracle_password", "sglang_ssl_keyfile_password", "--router-postgres-db-url", "OPENAI_KEY", "GITHUB_TOKEN",
     "judge_token", "hf_hub_token", "access_key", "private_key", "credentials", "authorization", "jwt", "passwd",
     "passphrase", "token", "apiKey", "accessToken", "X-Api-Key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "db_pwd",
     "basic-auth", "SERPER_API_KEY", "my.secret", "client_secret", "SSH_PASSPHRASE", "sqlDsn", "session_cookie",
     "HF_TOKEN_2",
     "OPENAI_API_KEY_2", "DB_PASS", "smtp_pass", "user_pw", "connection_string", "oauth_token", "accountKey",
     "refresh_token", "SLIME_SERVER_KEYS"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "tokenizer", "tokenizer_path", "keyword", "key", "input_key", "eval_input_key", "label_key",
     "reward_key", "metadata_key", "tool_key", "multimodal_keys", "router_client_key_path", "sglang_routing_key",
     "eos_token", "pad_token", "stop_token_ids", "sglang_bucket_time_to_first_token", "calculate_per_token_loss",
     "num_tokens", "tokens", "author", "authentication_mode", "ray_auth_mode", "SSH_AUTH_SOCK", "passes", "bypass",
     "router_jwt_issuer", "TOKENIZERS_PARALLELISM", "compass_url", "monkey", "turkey", "keys", "", "forward_pass",
     "num_passes", "token_type", "pad_token_id", "special_tokens_map", "kv_key", "primary_key", "passthrough",
     "pattern", "PWD", "OLDPWD",
     "apply_query_key_layer_scaling"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_of_slimes_own_flags_only_the_key_is_secret() -> None:
    assert [f.option for f in all_flags() if f.source in ("slime", "megatron") and is_secret(f.dest)] == ["--wandb-key"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://user:PW@h/x", "https://***@h/x"),
        ("http://u:P%40W@[fd00::1]:8000/a?b=c", "http://***@[fd00::1]:8000/a?b=c"),
        ("postgres://u:p/w@h/db", "postgres://***@h/db"),
        ("redis://:pw@h:6379", "redis://***@h:6379"),
        ("https://tok@github.com/x.git", "https://***@github.com/x.git"),
        ("https://u:p@ss@h/x", "https://***@h/x"),
        ("mongodb+srv://u:p@h/?x=1", "mongodb+srv://***@h/?x=1"),
        ('export HF_TOKEN="a b"', 'export HF_TOKEN="***"'),
        ('{"Authorization": "Bearer abc123456789"}', '{"Authorization": "***"}'),
        ("Basic dXNlcjpwYXNzd29yZA==", "Basic ***"),
        ("see https://u:pw@h and https://v:pw@i", "see https://***@h and https://***@i"),
        ("http://h/x?api_key=abc&b=1", "http://h/x?api_key=***&b=1"),
        ("http://h/x?b=1&key=abc", "http://h/x?b=1&key=***"),
        ("http://h/x?access_token=abc#f", "http://h/x?access_token=***"),
        ("Authorization: Bearer abcdefghijk", "Authorization: *** ***"),
        ("curl -H 'X: Bearer abcdefghijk'", "curl -H 'X: Bearer ***'"),
        ("OPENAI_KEY=abc python x.py", "OPENAI_KEY=*** python x.py"),
        ("--sglang-api-key abc --lr 1", "--sglang-api-key *** --lr 1"),
        ('{"a": {"OPENAI_KEY": "x y"}, "b": 1}', '{"a": {"OPENAI_KEY": "***"}, "b": 1}'),
        ("{'judge_token': 'x', 'n': 2}", "{'judge_token': '***', 'n': 2}"),
        ("wandb_key: abc\nlr: 1", "wandb_key: ***\nlr: 1"),
        ("hf_abcdefghijklmnopqrstuv in text", "*** in text"),
        ("x sk-proj-abcdefghijklmnop", "x ***"),
        ("ghp_abcdefghijklmnopqrst1", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        (f"t={JWT}.", "t=***."),
        (f"a {PEM} b", "a *** b"),
    ],
)
def test_secrets_in_a_text(text: str, shown: str) -> None:
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


@pytest.mark.parametrize(
    "text",
    ["http://127.0.0.1:15000/generate", "http://h:80/a@b", "http://h/@user", "git@github.com:a/b", "a@b.c",
     "--eval-input-key question --max-tokens-per-gpu 9216", "{'input_key': 'prompt', 'max_tokens': 5}",
     "tokens: 17, key: value", "s3://bucket/key=1/part", "/models/sk-net", "eos_token=</s>", "secret: null",
     "slime.rollout.rm_hub.math", "[fd00::1]:80", "authors: A, B", "basic functionality",
     "Bearer of news", "https://h/a:b@c/d",
     "api_key=None", "task-force-1234567890123", "hf_checkpoint: /m"],
)  # fmt: skip
def test_texts_without_secrets_stay(text: str) -> None:
    assert mask_text(text) == text


def test_every_depth_of_a_configuration() -> None:
    value = {
        "services": [
            {"judge": {"url": "http://u:pw@h/v1", "token": "x", "model": "m"}},
            ("hf_abcdefghijklmnopqrstuv",),
        ],
        "env": Namespace(OPENAI_KEY="k", A="b"),
        "tokens": [1, 2],
        "key": "Zm9vYmFyMTIzNDU2Nzg5MDEy",
        "input_key": "question",
    }
    assert plain("", value) == {
        "services": [{"judge": {"url": "http://***@h/v1", "token": MASK, "model": "m"}}, [MASK]],
        "env": {"OPENAI_KEY": MASK, "A": "b"},
        "tokens": [1, 2],
        "key": MASK,
        "input_key": "question",
    }


def test_values_that_the_process_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "from-the-environment")
    monkeypatch.setenv("MODEL_NAME", "not-secret-at-all")
    monkeypatch.setenv("MY_TOKEN_FILE", "/run/token")
    remember(Namespace(wandb_key="of-a-flag", nested={"env": [{"DB_PASSWORD": "deep-one"}]}, lr=1.0, short_token="ab"))
    for value in ("from-the-environment", "of-a-flag", "deep-one"):
        assert value not in mask_text(f"harmless {value}/x")
        assert plain("harmless", value) == MASK
    for value in ("not-secret-at-all", "/run/token", "about"):
        assert mask_text(value) == value


def test_a_command_line() -> None:
    words = [
        "train.py", "--sglang-api-key", "a", "--router-control-plane-api-keys", "b", "c", "--lr", "1e-6",
        "--wandb-key=d",
        "--train-env-vars", json.dumps({"OPENAI_API_KEY": "e", "A": "b"}), "--rm-url", "https://u:f@h",
        "--eval-input-key", "question",
    ]  # fmt: skip
    assert mask_words(words) == [
        "train.py", "--sglang-api-key", MASK, "--router-control-plane-api-keys", MASK, MASK, "--lr", "1e-6",
        "--wandb-key=***", "--train-env-vars", '{"OPENAI_API_KEY": "***", "A": "b"}', "--rm-url", "https://***@h",
        "--eval-input-key", "question",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, "", [], {}, True, False])
def test_what_is_empty_or_a_switch_is_shown(value: Any) -> None:
    assert plain("my_token", value) == value


def test_what_other_processes_inherit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "PLAIN", "MY_SECRET"):
        monkeypatch.setenv(name, "value-of-it")
    monkeypatch.setenv("SLIME_PASS_SECRETS", "HF_TOKEN,OTHER")
    inherited = secrets.public_environment()
    assert {"HF_TOKEN", "RAY_AUTH_TOKEN", "PLAIN", "PATH", "SLIME_PASS_SECRETS"} <= inherited.keys()
    assert not {"WANDB_API_KEY", "MY_SECRET"} & inherited.keys()


def test_a_file_of_credentials_is_inherited_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A secret in base64 may begin with a slash too."""
    (file := tmp_path / "credentials.json").touch()
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "AWS_SHARED_CREDENTIALS_FILE", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, str(file))
        assert secrets.public_environment()[name] == str(file)
        assert str(file) in mask_text(f"read {file}")
        for value in ("the-secret-itself", "/bPxRfiCYEXAMPLEKEY7wJalrXUtnFE3"):
            monkeypatch.setenv(name, value)
            assert name not in secrets.public_environment()
            remember({name: value})
            assert value not in mask_text(f"with {value} it failed")


@pytest.mark.parametrize("word", ["a" * 100_000, "a-" * 50_000, "abc." * 30_000])
def test_long_words_are_masked_in_linear_time(word: str) -> None:
    began = time.process_time()
    assert secrets.mask_text(f"the key is {word} api_key=abcdefgh").endswith(f"{word} api_key={MASK}")
    assert time.process_time() - began < 2


def test_numbers_of_tokens_are_shown() -> None:
    assert plain("output_token", 512) == 512
    assert plain("args", {"max_output_token": 512, "api_token": "abc"}) == {"max_output_token": 512, "api_token": MASK}


def test_ps_shows_no_secrets() -> None:
    code = "from slime.utils.secrets import hide_command_line as h; h(); print(open('/proc/self/cmdline').read()); h()"
    words = ["--sglang-api-key", "s3cret", "--wandb-key=hush", "--rm-url", "http://u:pw@h", "--lr", "1e-6"]
    words += ["--wandb-key", "a"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=True)
    shown = done.stdout.strip().split("\0")[3:-1]
    assert shown[:3] == ["--sglang-api-key", "***" + "***", "--wandb-key=" + "*" * 4]
    assert not any(secret in done.stdout for secret in ("s3cret", "hush", "pw@"))
    assert [len(word) for word in shown] == [len(word) for word in words]
    assert shown[-4:] == ["--lr", "1e-6", "--wandb-key", "*"]
