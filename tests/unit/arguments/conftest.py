from __future__ import annotations

import pytest

from slime.arguments.command_line import all_flags, build_parser


@pytest.fixture(scope="session")
def flags():
    return all_flags()


@pytest.fixture(scope="session")
def parser(flags):
    return build_parser(flags)
