"""Values as JSON: back bit for bit, small, and readable from the files of older releases."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.durable.state_codec import NotStorable, decode_group, decode_value, encode_group, encode_value
from slime.utils.types import Sample


def there_and_back(value: Any) -> Any:
    return decode_value(json.loads(json.dumps(encode_value(value))))


def bits(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


FLOATS = st.one_of(st.floats(), st.floats(width=32), st.just(-0.0), st.just(0.0))


@settings(max_examples=200, deadline=None)
@given(st.lists(FLOATS, max_size=80), st.booleans())
def test_floats_round_trip_bit_for_bit(values: list[float], constant: bool) -> None:
    values = values[:1] * 40 if constant else values
    again = there_and_back(values)
    assert all(type(x) is float for x in again)
    # The JSON of a short list knows one NaN only, as everything else in Python does that writes a NaN down.
    same_nan = [float("nan") if math.isnan(x) else x for x in values]
    assert bits(again) in (bits(values), bits(same_nan))


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 80).flatmap(
        lambda bits: st.lists(st.integers(-(2**bits), 2**bits - 1), max_size=60).map(lambda x: x * (1 + (bits < 9)))
    )
)
def test_ints_round_trip(values: list[int]) -> None:
    again = there_and_back(values)
    assert again == values
    assert all(type(x) is int for x in again)


@pytest.mark.parametrize("edge", [0, 2**7, 2**8, 2**15, 2**16, 2**31, 2**32, 2**63])
@pytest.mark.parametrize("sign", [1, -1])
def test_ints_at_the_edges_of_widths(edge: int, sign: int) -> None:
    for value in (sign * edge - 1, sign * edge, sign * edge + 1):
        values = [0, 5] * 20 + [value]
        assert there_and_back(values) == values


@pytest.mark.parametrize("value", [-0.0, 0.1, float("inf"), float("nan")])
def test_lists_of_one_float(value: float) -> None:
    assert bits(there_and_back([value] * 30)) == bits([value] * 30)
    assert bits(there_and_back([0.0, -0.0] * 15)) == bits([0.0, -0.0] * 15)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(200, dtype="<i8").reshape(2, 100),
        np.array([[2**40]]),
        np.array([], dtype="<i4"),
        np.array([1.5, -0.0, np.nan], dtype="<f4"),
        np.array([True, False]),
        np.array(7, dtype="<u2"),
    ],
)
def test_arrays_keep_dtype_and_shape(array: np.ndarray) -> None:
    again = there_and_back(array)
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())
    again[...] = 0  # not a view of something that cannot be written
    tensor = torch.from_numpy(array.copy())
    back = there_and_back(tensor)
    assert back.dtype == tensor.dtype
    assert torch.equal(back.nan_to_num(9.0), tensor.nan_to_num(9.0))


def test_bfloat16_round_trips() -> None:
    tensor = torch.tensor([[1.5, -0.0, 3e38]], dtype=torch.bfloat16)
    back = there_and_back(tensor)
    assert back.dtype == torch.bfloat16
    assert torch.equal(back.view(torch.int16), tensor.view(torch.int16))


def test_a_response_costs_eleven_bytes_per_token() -> None:
    """Four bytes each for id and log-prob, base64 of them (4/3), and next to nothing for the mask and the names."""
    rng, length = random.Random(0), 4096
    sample = Sample(index=0, group_index=0, prompt="p", tokens=[1, 2])
    sample.append_response_tokens(
        tokens=[rng.randrange(150_000) for _ in range(length)],
        log_probs=[struct.unpack("<f", struct.pack("<f", -rng.random()))[0] for _ in range(length)],
    )
    data = json.dumps(encode_group([sample]), separators=(",", ":"))
    assert len(data) <= 8 * 4 / 3 * length + 1500
    assert decode_group(json.loads(data)) == [sample]


def test_experts_are_as_narrow_as_they_can_be() -> None:
    routed = torch.randint(0, 128, (64, 4, 8), dtype=torch.int32)
    data = encode_value(routed)
    assert len(json.dumps(data)) <= routed.numel() * 4 / 3 + 100
    back = decode_value(data)
    assert back.dtype == torch.int32
    assert torch.equal(back, routed)


def test_files_of_older_releases_are_read() -> None:
    ints, floats = [3, -(2**40)] * 10, [0.1, -1e300] * 10
    old = {
        "__ints__": base64.b64encode(struct.pack("<20q", *ints)).decode(),
    }
    assert decode_value(old) == ints
    assert decode_value({"__floats__": base64.b64encode(bits(floats)).decode()}) == floats
    array = {"__array__": ["<i4", [2, 1], base64.b64encode(struct.pack("<2i", 7, -1)).decode()], "torch": "int32"}
    assert torch.equal(decode_value(array), torch.tensor([[7], [-1]], dtype=torch.int32))


@pytest.mark.parametrize("tag", ["__packed__", "__repeated__", "__ints__", "__escaped__"])
def test_names_of_ours_in_data_of_users(tag: str) -> None:
    value = {"a": {tag: [1, 2]}, "b": [{tag: {"c": None}}]}
    assert there_and_back(value) == value


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {None: 1, True: [2.5]}, {2.5: {3: 4}}, {"__items__": [[1, 2]]}])
def test_keys_round_trip(value: dict[Any, Any]) -> None:
    assert there_and_back(value) == value


NOT_STORED = [
    {1, 2},
    np.datetime64("2026-01-01"),
    np.longdouble(1.5),
    np.array([object()]),
    np.zeros(2, [("a", "<i4")]),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
    torch.eye(2).to_sparse(),
    {(1, 2): 3},
]


@pytest.mark.parametrize("value", NOT_STORED, ids=[str(type(value)) for value in NOT_STORED])
def test_what_has_no_form_is_left_out_of_what_users_noted(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    sample = Sample(index=3, metadata={"seen": value, "deep": [{"er": value}], "kept": 1})
    sample.extra = value  # type: ignore[attr-defined]
    (found,) = decode_group(json.loads(json.dumps(encode_group([sample]))))
    assert found.metadata == {"kept": 1}
    assert not hasattr(found, "extra")
    for said in ("metadata['seen'] is not saved", "metadata['deep'] is not saved", "'extra' is not saved"):
        assert said in caplog.text
    assert sample.metadata["seen"] is value
    for name in ("label", "train_metadata"):
        with pytest.raises(NotStorable, match=f"sample index=4: field '{name}' cannot be saved"):
            encode_group([Sample(index=4, **{name: value})])


def test_who_encodes_can_take_a_breath_after_each_long_list() -> None:
    group = [Sample(tokens=list(range(600)), loss_mask=[1] * 600), [Sample(tokens=[1])]]
    breaths: list[None] = []
    encode_group(group, lambda: breaths.append(None))
    assert len(breaths) == 2


@dataclass
class Chat(Sample):
    messages: list[dict[str, str]] = field(default_factory=list)


def test_samples_of_a_subclass_are_restored_as_such_where_it_is_loaded(caplog: pytest.LogCaptureFixture) -> None:
    chat = Chat(index=3, messages=[{"role": "user"}], tokens=list(range(40)))
    chat.extra = 7  # type: ignore[attr-defined]
    group = [chat, [Sample(index=4)]]
    data = json.loads(json.dumps(encode_group(group)))
    found = decode_group(data)
    assert found == group
    assert type(found[0]) is Chat
    assert found[0].extra == 7
    assert type(found[1][0]) is Sample
    assert data[1][0].keys() == Sample().to_dict().keys()
    data[0]["__class__"] = "os.system"  # nothing is imported, and nothing called, that a file names
    (plain, _) = decode_group(data)
    assert type(plain) is Sample
    assert plain.messages == chat.messages  # type: ignore[attr-defined]
    assert "samples were saved as os.system, which is not loaded" in caplog.text


class Meddling(list[int]):
    """Adds a key to a dictionary whenever it is looked through: what another thread may do at that moment."""

    def __init__(self, target: dict[Any, Any]) -> None:
        super().__init__([1, 2])
        self.target = target

    def __iter__(self) -> Any:
        self.target[f"new {len(self.target)}"] = 1
        return super().__iter__()


@pytest.mark.parametrize("first", ["a", 1])
@pytest.mark.parametrize("more", [{}, {"odd": {1, 2}}])
def test_metadata_may_change_while_it_is_encoded(first: Any, more: dict[str, Any]) -> None:
    metadata: dict[Any, Any] = {first: None, "b": 2, **more}
    metadata[first] = Meddling(metadata)
    (found,) = decode_group(json.loads(json.dumps(encode_group([Sample(metadata=metadata)]))))
    assert (found.metadata[first], found.metadata["b"]) == ([1, 2], 2)
