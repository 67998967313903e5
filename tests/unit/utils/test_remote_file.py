"""Fetching files that others name: public hosts alone, also behind redirects and changing names; deadline and size."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from slime.utils import remote_file
from slime.utils.remote_file import RemoteFileError, fetch, is_public


class Handler(BaseHTTPRequestHandler):
    asked: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.asked.append((self.headers["Host"], self.path))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/drip":
            self.send_response(200)
            self.end_headers()
            for _ in range(100):
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        elif self.path == "/short":
            self.send_response(200)
            self.send_header("Content-Length", "10")
            self.end_headers()
            self.wfile.write(b"12345")
        elif self.path.startswith("/sized"):
            self.send_response(200)
            if self.path == "/sized":
                self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"x" * 100)
        else:
            self.send_error(404)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that is at a public address, as far as ``fetch`` can see: 127.0.0.1 alone."""
    Handler.asked.clear()
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    public = remote_file.is_public
    monkeypatch.setattr(remote_file, "is_public", lambda address: address == "127.0.0.1" or public(address))
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda host, *a, **k: resolve("127.0.0.1" if host == "pictures.example" else host, *a, **k),
    )  # fmt: skip
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield f"http://pictures.example:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.10", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0",
        "255.255.255.255", "224.0.0.1", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1",
        "::127.0.0.1", "::ffff:0:127.0.0.1", "fec0::1", "64:ff9b:1::7f00:1", "5f00::1",
        "::ffff:127.0.0.1", "::ffff:169.254.169.254", "2002:7f00:1::", "2002:c0a8:101::1", "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe", "192.0.2.1", "198.18.0.1", "no address", "",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address):
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:{port}/sized", "http://localhost:{port}/sized", "http://[::1]:{port}/sized",
        "http://2130706433:{port}/sized", "http://0x7f.1:{port}/sized", "http://0:{port}/sized",
        "http://[::ffff:127.0.0.1]:{port}/sized", "http://169.254.169.254/latest/meta-data",
    ],
)  # fmt: skip
def test_loopback_and_link_local_are_not_fetched_from(url):
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Handler.asked.clear()
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    with pytest.raises(RemoteFileError, match=r"is no public address|is not known"):
        fetch(url.format(port=httpd.server_port), 1000, 5)
    httpd.shutdown()
    httpd.server_close()
    assert Handler.asked == []


@pytest.mark.parametrize("path", ["/sized", "/sized/unknown"])
def test_a_file(server, path):
    assert fetch(server + path, 100, 5) == b"x" * 100
    assert Handler.asked == [(server.removeprefix("http://"), path)]
    with pytest.raises(RemoteFileError, match=r"has 100 bytes; 99 are allowed|has more than 99 bytes"):
        fetch(server + path, 99, 5)


def test_names_of_files_are_quoted(server):
    assert fetch(server + "/sized/a b/\u00fc%20.png?q=a b&r=1?", 100, 5) == b"x" * 100
    assert Handler.asked[-1][1] == "/sized/a%20b/%C3%BC%20.png?q=a%20b&r=1?"


def test_an_address_that_does_not_answer(server, monkeypatch):
    port = int(server.rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in ("127.0.0.3", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    monkeypatch.setattr(remote_file, "is_public", lambda address: True)
    connect = socket.create_connection
    tried = []

    def refusing(place: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(place[0])
        if place[0] == "127.0.0.3":
            raise ConnectionRefusedError
        return connect(place, timeout)

    monkeypatch.setattr(socket, "create_connection", refusing)
    with pytest.raises(RemoteFileError, match="answered 404"):
        fetch(server + "/nothing", 100, 5)
    assert tried == ["127.0.0.3", "127.0.0.1"]


def test_a_name_that_resolves_to_another_address_later(server, monkeypatch):
    """Only the address that was checked is connected to."""
    resolve, asked = socket.getaddrinfo, []

    def changing(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "pictures.example":
            asked.append(host)
            return resolve("127.0.0.1" if len(asked) == 1 else "127.0.0.2", *args, **kwargs)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", changing)
    assert fetch(server + "/sized", 100, 5) == b"x" * 100
    assert len(asked) == 1
    with pytest.raises(RemoteFileError, match=r"pictures\.example is at 127\.0\.0\.2, which is no public address"):
        fetch(server + "/sized", 100, 5)


def test_one_address_of_several_is_enough_to_refuse(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 80)) for ip in ("8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: found)
    with pytest.raises(RemoteFileError, match=r"is at 10\.0\.0\.1"):
        fetch("http://pictures.example/a.png", 100, 5)


def test_redirects(server):
    port = server.rpartition(":")[2]
    assert fetch(f"{server}/to//sized", 100, 5) == b"x" * 100
    for target in (f"http://127.0.0.2:{port}/sized", "http://169.254.169.254/", "http://[::1]/"):
        with pytest.raises(RemoteFileError, match="which is no public address"):
            fetch(f"{server}/to/{target}", 100, 5)
    for target in ("file:///etc/passwd", "ftp://8.8.8.8/a", "http://user:word@8.8.8.8/"):
        with pytest.raises(RemoteFileError, match="only http and https addresses without a user"):
            fetch(f"{server}/to/{target}", 100, 5)
    with pytest.raises(RemoteFileError, match="more than 3 redirects"):
        fetch(f"{server}/to//to//to//to//sized", 100, 5)


def test_a_slow_server(server):
    began = time.monotonic()
    with pytest.raises(RemoteFileError, match=r"/drip was not fetched within 0\.5 s"):
        fetch(server + "/drip", 1000, 0.5)
    assert time.monotonic() - began < 3


def test_a_name_server_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: time.sleep(3))
    with pytest.raises(RemoteFileError, match=r"was not fetched within 0\.2 s"):
        fetch("http://pictures.example/a.png", 100, 0.2)


def test_what_is_not_there(server):
    with pytest.raises(RemoteFileError, match="answered 404"):
        fetch(server + "/other", 100, 5)
    with pytest.raises(RemoteFileError, match="ended 5 bytes early"):
        fetch(server + "/short", 100, 5)
    with pytest.raises(RemoteFileError, match=r"the host nowhere\.invalid is not known"):
        fetch("http://nowhere.invalid/a.png", 100, 5)
