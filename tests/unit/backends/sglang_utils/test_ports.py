"""Ports are free, and not given to two callers."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from slime.backends.sglang_utils.ports import FIRST, LAST, is_free, looks_like_port_conflict, reserve_ports


def test_callers_in_a_row_get_different_ports(tmp_path: Path) -> None:
    cursor = tmp_path / "cursor"
    ports = [p for _ in range(20) for p in reserve_ports(2, cursor_file=cursor)]
    assert len(set(ports)) == 40
    assert all(FIRST <= p <= LAST for p in ports)


def test_callers_at_once_get_different_ports(tmp_path: Path) -> None:
    cursor, ports = tmp_path / "cursor", []
    threads = [threading.Thread(target=lambda: ports.extend(reserve_ports(3, cursor_file=cursor))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(ports) == len(set(ports)) == 36


def test_a_port_in_use_is_passed_over(tmp_path: Path) -> None:
    cursor = tmp_path / "cursor"
    base = reserve_ports(3, consecutive=True, cursor_file=cursor)
    with socket.create_server(("127.0.0.1", base[1])):
        assert not is_free(base[1])
        cursor.write_text(str(base[0]))
        assert base[1] not in reserve_ports(3, cursor_file=cursor)
        cursor.write_text(str(base[0]))
        first, second, third = reserve_ports(3, consecutive=True, cursor_file=cursor)
        assert (first, second, third) == (first, first + 1, first + 2)
        assert first > base[1]


def test_the_cursor_wraps_around_and_survives_nonsense(tmp_path: Path) -> None:
    cursor = tmp_path / "cursor"
    cursor.write_text(str(LAST))
    ports = reserve_ports(4, cursor_file=cursor)
    assert len(set(ports)) == 4
    assert min(ports) < LAST
    cursor.write_text("nonsense")
    assert FIRST <= reserve_ports(1, cursor_file=cursor)[0] < FIRST + 1000


def test_a_link_in_place_of_the_cursor_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep")
    (tmp_path / "cursor").symlink_to(victim)
    with pytest.raises(OSError, match="cursor"):
        reserve_ports(1, cursor_file=tmp_path / "cursor")
    assert victim.read_text() == "keep"


def test_messages_of_a_taken_port() -> None:
    assert looks_like_port_conflict(["x", "OSError: [Errno 98] Address already in use"])
    assert looks_like_port_conflict(["[Errno 98] error while attempting to bind on address: address already in use"])
    assert not looks_like_port_conflict(["torch.OutOfMemoryError"])
