"""The order of nodes."""

from __future__ import annotations

import socket

import pytest

from slime.ray.cluster import node_sort_key


def test_nodes_are_ordered_by_number_not_by_text() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.255.0.1", "10.0.0.100"]
    assert sorted(addresses, key=node_sort_key) == ["9.255.0.1", "10.0.0.9", "10.0.0.10", "10.0.0.100"]


def test_names_are_resolved_and_else_ordered_by_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(name: str) -> str:
        if name == "b-node":
            return "10.0.0.2"
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname", lookup)
    assert node_sort_key("b-node") == node_sort_key("10.0.0.2") == (10, 0, 0, 2)
    assert node_sort_key("nowhere") == tuple(ord(c) for c in "nowhere")
    assert sorted(["zz", "aa"], key=node_sort_key) == ["aa", "zz"]
