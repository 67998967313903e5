from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime.arguments import parse
from slime.arguments.command_line import all_flags, build_parser
from tests.support.arguments import known


@pytest.fixture(scope="session")
def flags():
    return all_flags()


@pytest.fixture(scope="session")
def parser(flags):
    return build_parser(flags)


@pytest.fixture(scope="session", autouse=True)
def _one_parser() -> Iterator[None]:
    """Let ``parse_args`` take one parser for all tests, but where a test has flags of its own.

    Building it is three quarters of what reading a command line costs, and reading leaves it as it is.
    """

    def build(flags, add_custom_arguments=None):
        shared, parser = known()
        return parser if add_custom_arguments is None and flags is shared else build_parser(flags, add_custom_arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parse, "build_parser", build)
        yield
