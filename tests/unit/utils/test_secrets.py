"""Settings whose values are written nowhere, against the flags that are declared."""

from __future__ import annotations

import pytest

from slime.arguments.command_line import all_flags
from slime.utils.plain import is_secret


@pytest.mark.parametrize(
    "name",
    ["wandb_key", "sglang_api_key", "sglang_admin_api_key", "--router-control-plane-api-keys", "HF_TOKEN",
     "router_oracle_password", "sglang_ssl_keyfile_password", "--router-postgres-db-url"],
)  # fmt: skip
def test_secrets(name):
    assert is_secret(name)


def test_of_slimes_own_flags_only_the_key_is_secret():
    assert [f.option for f in all_flags() if f.source in ("slime", "megatron") and is_secret(f.dest)] == ["--wandb-key"]
