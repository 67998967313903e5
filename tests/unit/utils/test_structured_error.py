"""Errors carry data through processes and texts."""

from __future__ import annotations

import json
import pickle

import pytest

from slime.backends.sglang_utils.errors import EngineStartError
from slime.ray.remote import EngineDied, RemoteFailure, describe, reports_errors
from slime.servers.engine_client import EngineClient
from slime.servers.http import EngineError
from slime.utils.structured_error import StructuredError, data_of, from_text, merged, to_text
from slime.weights.delta.host_copy import NoWayError
from slime.weights.delta.manifest import Version
from tests.support.fake_ray import remote
from tests.support.http_stub import http_stub


@pytest.mark.parametrize("kind", [StructuredError, RemoteFailure, EngineDied, EngineStartError])
def test_the_data_of_an_error_survives_pickling(kind: type[StructuredError]) -> None:
    error = kind("engine 1 hangs")
    error.data = {"hanging": {"http://e1": "could not pause"}}
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived)) == (kind, "engine 1 hangs")
    assert arrived.data == {"hanging": {"http://e1": "could not pause"}}


@pytest.mark.parametrize(
    "error",
    [
        NoWayError(Version("run", 3, "state"), "weight_v000002 cannot be read"),
        EngineError("GET", "http://e1", status=400, body="no"),
    ],
    ids=["NoWayError", "EngineError"],
)
def test_errors_with_parameters_of_their_own_survive_pickling(error: StructuredError) -> None:
    arrived = pickle.loads(pickle.dumps(error))
    assert (type(arrived), str(arrived), vars(arrived)) == (type(error), str(error), vars(error))


def test_the_data_of_an_error_in_an_actor_of_an_actor_reaches_the_driver() -> None:
    class Host:
        @reports_errors
        def pull(self) -> None:
            raise NoWayError(Version("run", 3, "state"), "weight_v000002 cannot be read")

    class Manager:
        @reports_errors
        def load(self) -> None:
            try:
                Host().pull()
            except RemoteFailure as e:
                arrived = pickle.loads(pickle.dumps(e))
                raise describe(remote(arrived), "engine 0", "copying", None) from None

    with pytest.raises(RemoteFailure) as raised:
        Manager().load()
    arrived = describe(remote(pickle.loads(pickle.dumps(raised.value))), "the rollout manager", "loading", None)
    assert arrived.data == {"needs_full_version": True}
    assert str(arrived).startswith("NoWayError: no way from a whole version of the weights to")


def test_the_data_of_a_cause_counts_and_the_words_of_the_first_error_of_another_package() -> None:
    refused = StructuredError("not for this engine", {"refused": True})
    outer, middle = ValueError("bad mask"), StructuredError("no reply")
    outer.__cause__, middle.__cause__ = refused, ConnectionResetError("Connection reset by peer")
    assert data_of(outer) == {"refused": True}
    assert data_of(middle) == {"peer_lost": True}
    outer.__cause__ = ConnectionResetError("Connection reset by peer")
    assert data_of(outer) == {}  # a mistake of its own, whatever came before
    refused.__cause__ = refused
    assert data_of(refused) == {"refused": True}
    assert data_of(StructuredError("said: broken pipe")) == data_of(None) == {}


def test_several_errors_as_one() -> None:
    assert merged(
        [
            {"hanging": {"http://e0": "could not pause"}},
            {"refused": True, "hanging": {"http://e0": "could not continue", "http://e1": "could not continue"}},
            {"refused": False},
        ]
    ) == {"refused": True, "hanging": {"http://e0": "could not pause", "http://e1": "could not continue"}}


def test_an_engine_s_reply_carries_data() -> None:
    """As SGLang makes one: the texts of its ranks are joined, and are a string in JSON."""
    texts = [to_text('rank 0: "x"', {"refused": True}), to_text("rank 1", {"needs_full_version": True})]
    reply = (400, {"success": False, "message": " | ".join(texts)})
    with http_stub(lambda request: reply) as server, pytest.raises(EngineError) as raised:
        EngineClient(server.url).update_weights_from_distributed(names=[], dtypes=[], shapes=[], group_name="g")
    assert raised.value.data == {"refused": True, "needs_full_version": True}
    assert json.loads(raised.value.body) == {"success": False, "message": 'rank 0: "x" | rank 1'}
    assert "slime-error-data" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "plain", "[slime-error-data:%%%]", "[slime-error-data:%5B1%5D]"])
def test_texts_of_others_hold_no_data(text: str) -> None:
    assert from_text(text)[1] == {}
