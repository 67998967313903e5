"""The number of connections this process can open."""

from __future__ import annotations

import resource

import pytest

from slime.utils import network
from slime.utils.network import connection_limit


@pytest.fixture
def limits(monkeypatch, tmp_path):
    """Set the limits of open files and the range of local ports; return what limits were set later."""
    raised: list[tuple[int, int]] = []

    def set_limits(soft: int, hard: int, ports: str | None) -> list[tuple[int, int]]:
        monkeypatch.setattr(network, "_told", set())
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda kind, both: raised.append(both))
        if ports is not None:
            (tmp_path / "range").write_text(ports)
        monkeypatch.setattr(network, "PORT_RANGE", tmp_path / "range")
        return raised

    return set_limits


@pytest.mark.parametrize(
    ("wanted", "soft", "hard", "ports", "expected"),
    [
        (512, 65536, 65536, "32768\t60999", 512),
        (64 * 512, 1 << 20, 1 << 20, "32768\t60999", 25408),
        (64 * 512, 1 << 20, 1 << 20, "1024\t65535", 64 * 512),
        (64 * 512, 20000, 20000, "1024\t65535", 20000 - 1024),
        (4096, 1024, 1024, "32768\t60999", 512),
        (64 * 512, resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 64 * 512),
    ],
)
def test_open_files_and_local_ports_limit_the_connections(limits, caplog, wanted, soft, hard, ports, expected):
    raised = limits(soft, hard, ports)
    assert connection_limit(wanted) == connection_limit(wanted) == expected
    assert len(caplog.records) == (expected < wanted), "it is told once"
    assert not raised


def test_the_soft_limit_is_raised_where_it_is_too_low(limits, caplog):
    raised = limits(1024, 65536, "32768 60999")
    assert connection_limit(8192) == 8192
    assert raised == [(65536, 65536)]
    assert not caplog.records
