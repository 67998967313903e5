from __future__ import annotations

import pytest

from slime.arguments import ArgumentError


@pytest.fixture
def write(tmp_path):
    """``write(text)`` makes a file of ``text`` and returns its path."""

    def write_file(text: str, name: str = "file.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write_file


@pytest.fixture
def mistakes(write):
    """``mistakes(read, option, text)`` is what ``read`` says of a file with ``text``, without option and path."""

    def messages_of(read, option: str, text: str) -> list[str]:
        path = write(text)
        with pytest.raises(ArgumentError) as caught:
            read(path)
        lines = str(caught.value).splitlines()
        assert all(line.startswith(f"{option} {path}") for line in lines), lines
        return [line.removeprefix(f"{option} {path}").lstrip(":, ") for line in lines]

    return messages_of
