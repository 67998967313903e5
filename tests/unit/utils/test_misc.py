"""Small helpers plugins import."""

from __future__ import annotations

import os.path
import socket

import pytest
import torch

from slime.utils import network
from slime.utils.misc import (
    Box,
    SingletonMeta,
    chunk_named_params_by_size,
    decode_int32_meta_array,
    exec_command,
    get_free_port,
    group_by,
    load_function,
    should_run_periodic_action,
)


def test_load_function_caches_and_explains():
    assert load_function("os.path.join") is os.path.join
    assert load_function("os.path.join") is load_function("os.path.join", "--custom-rm-path")
    with pytest.raises(AttributeError, match=r"--custom-rm-path 'os.path.joim'.*did you mean os.path.join"):
        load_function("os.path.joim", "--custom-rm-path")
    with pytest.raises(ImportError, match=r"no_such_package.*PYTHONPATH"):
        load_function("no_such_package.fn")
    for path in ("noflag", "file.py:fn", "a/b.fn"):
        with pytest.raises(ValueError, match="dotted path"):
            load_function(path)


def test_singletons():
    class One(metaclass=SingletonMeta):
        def __init__(self, x: int) -> None:
            self.x = x

    first = One(1)
    assert One(2) is first
    SingletonMeta.clear_instances()
    assert One(3).x == 3
    SingletonMeta.clear_instances()


@pytest.mark.parametrize("clear", [lambda cls: SingletonMeta.clear_instances(cls), lambda cls: cls.clear_instances()])
def test_one_singleton_of_several_is_cleared(clear):
    class One(metaclass=SingletonMeta):
        pass

    class Other(metaclass=SingletonMeta):
        pass

    one, other = One(), Other()
    clear(One)
    assert One() is not one
    assert Other() is other
    clear(One)
    clear(One)  # which has no instance any more
    SingletonMeta.clear_instances()
    assert Other() is not other
    SingletonMeta.clear_instances()


def test_box_and_group_by():
    assert Box([1]).inner == [1]
    assert group_by([3, 1, 4, 1, 5], key=lambda x: x % 2) == {1: [3, 1, 1, 5], 0: [4]}
    assert group_by("aba") == {"a": ["a", "a"], "b": ["b"]}


@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        ((None, 4, 10), []),
        ((3,), [2, 5, 8]),
        ((3, 4), [2, 3, 5, 7, 8]),
        ((4, None, 10), [3, 7, 9]),
        ((100, 5, 10), [4, 9]),
    ],
)
def test_periodic_actions(arguments, when):
    assert [r for r in range(10) if should_run_periodic_action(r, *arguments)] == when


def test_chunks_by_bytes():
    params = [(str(i), torch.zeros(n)) for i, n in enumerate([1, 1, 3, 1, 1])]
    chunks = [[name for name, _ in chunk] for chunk in chunk_named_params_by_size(params, 8)]
    assert chunks == [["0", "1"], ["2"], ["3", "4"]]
    assert list(chunk_named_params_by_size([], 8)) == []


def test_int32_arrays():
    assert decode_int32_meta_array(torch.tensor([[1, 2], [3, 4]])).tolist() == [1, 2, 3, 4]
    assert decode_int32_meta_array([]).tolist() == []
    with pytest.raises(ValueError, match="whole number"):
        decode_int32_meta_array(b"123")
    with pytest.raises(ValueError, match="integers"):
        decode_int32_meta_array([1.5])


def test_commands():
    assert exec_command("echo $((1+2))", capture_output=True) == "3\n"
    with pytest.raises(RuntimeError, match="exited with 3"):
        exec_command("exit 3")


def test_ports():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        assert not network.is_port_available(port)
        assert get_free_port(port) > port
        assert network.find_available_port(port) >= port + 42
    assert not network.is_port_available(70000)
    free = get_free_port(20000, consecutive=3)
    assert all(network.is_port_available(p) for p in range(free, free + 3))


def test_addresses(monkeypatch):
    assert network._wrap_ipv6("fe80::1") == "[fe80::1]"
    assert network._wrap_ipv6("[fe80::1]") == "[fe80::1]"
    assert network._wrap_ipv6("10.0.0.1") == "10.0.0.1"
    assert network._wrap_ipv6("host.example") == "host.example"
    monkeypatch.setenv("SLIME_HOST_IP", "10.9.8.7")
    assert network.get_host_info()[1] == "10.9.8.7"
    monkeypatch.delenv("SLIME_HOST_IP")
    monkeypatch.setattr(network, "_probe_address", lambda *a: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert network.get_host_info()[1] == "127.0.0.1"
    monkeypatch.setenv("SLIME_PREFER_IPV6", "1")
    assert network.get_host_info()[1] == "::1"
