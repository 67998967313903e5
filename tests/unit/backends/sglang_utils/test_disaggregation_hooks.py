"""Prefill and decode engines: one that waits for another's caches leaves it the cores, and experts go with caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.engine_plugin import engine_plugin


@pytest.mark.parametrize(
    ("sleeps_on_idle", "has_requests", "polled"), [(True, True, 1), (True, False, 0), (False, True, 0)]
)
def test_it_polls_with_a_pause_while_requests_wait(sleeps_on_idle: bool, has_requests: bool, polled: int) -> None:
    timeouts: list[int] = []
    sleeper = SimpleNamespace(poller=SimpleNamespace(poll=timeouts.append)) if sleeps_on_idle else None
    with engine_plugin() as load:
        hooks = load("cpu.disaggregation")
        hooks.wait_for_caches(None, SimpleNamespace(idle_sleeper=sleeper, is_fully_idle=lambda: not has_requests))
    assert timeouts == [hooks.POLL_MS] * polled


def experts_of(load: Any, monkeypatch: pytest.MonkeyPatch, slots: int) -> tuple[Any, torch.Tensor]:
    """The module, and experts of ``slots`` slots of a cache: 3 layers, top-2."""
    hooks = load("server.prompt_experts")
    rows = torch.arange(slots * 6, dtype=torch.int32).reshape(slots, 3, 2)
    monkeypatch.setattr(hooks, "rows_of_slots", lambda: rows)
    return hooks, rows


def test_pages_of_experts_are_sent_as_one_more_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nixl as host memory, whatever the other states are."""
    kv_args = SimpleNamespace(page_size=4, state_data_ptrs=[], state_data_lens=[])
    added: list[Any] = []
    registered: list[Any] = []
    sent: list[dict[str, Any]] = []

    def append(kv_args: Any, kind: str, pointers: list[int], sizes: list[int], pages: list[int]) -> None:
        added.append((kind, pages))
        kv_args.state_data_ptrs.append(pointers)
        kv_args.state_data_lens.append(sizes)

    sglang = {
        "disaggregation.base.conn": {"StateType": SimpleNamespace(QSA_COMPRESSED="qsa_compressed")},
        "disaggregation.utils": {"append_state_component": append},
    }
    agent = SimpleNamespace(register_memory=lambda memory, kind: registered.append((memory, kind)) or True)
    manager = SimpleNamespace(kv_args=kv_args, agent=agent)
    with engine_plugin(sglang) as load:
        hooks, rows = experts_of(load, monkeypatch, 8)
        hooks.add_experts(None, kv_args)
        assert added == [("qsa_compressed", [4 * 6 * 4])]
        assert kv_args.state_data_lens == [[8 * 6 * 4]]
        hooks.register_as_host_memory(lambda one: registered.append(list(one.kv_args.state_data_lens)), manager)
        hooks.send_from_host_memory(lambda *_, **told: sent.append(told), manager, src_data_ptrs=[rows.data_ptr()])
        hooks.send_from_host_memory(lambda *_, **told: sent.append(told), manager, src_data_ptrs=[1])
    assert registered == [[[0]], ([(rows.data_ptr(), 192, 0, "")], "DRAM")]
    assert kv_args.state_data_lens == [[192]]
    assert [call.get("src_mem_kind") for call in sent] == [call.get("dst_mem_kind") for call in sent] == ["DRAM", None]


def test_experts_of_a_retracted_request_get_its_new_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=0), seqlen=4)
    pool = SimpleNamespace(req_to_token=torch.tensor([[5, 1, 2, 0]]))
    with engine_plugin() as load:
        hooks, rows = experts_of(load, monkeypatch, 8)
        before = rows[[5, 1, 2]].clone()
        assert hooks.keep(lambda *_: True, request, None, pool, None, "cpu_tensor")
        rows.zero_()
        pool.req_to_token[0, :3] = torch.tensor([3, 4, 7])
        hooks.bring_back(lambda *_: None, request, None, pool, None, "cpu_tensor")
    assert torch.equal(rows[[3, 4, 7]], before)
    assert rows.count_nonzero() == before.count_nonzero()


def test_experts_of_requests_that_the_first_token_ends_are_read_before_their_slots_are_freed() -> None:
    read: list[Any] = []
    ends = SimpleNamespace(update_finish_state=lambda: None, finished=lambda: True)
    goes = SimpleNamespace(update_finish_state=lambda: None, finished=lambda: False)
    with engine_plugin() as load:
        hooks = load("server.prompt_experts")
        processor = SimpleNamespace(_maybe_collect_routed_experts=read.append)
        assert hooks.collect_of_first_tokens(processor, SimpleNamespace(reqs=[ends, goes])) is None
    assert read == [ends]


@pytest.mark.parametrize(
    ("words", "hooked"),
    [
        ("--disaggregation-mode=decode", 0),
        ("--enable-return-routed-experts", 0),
        ("--disaggregation-mode=decode --enable-return-routed-experts", 4),
        ("--disaggregation-mode=prefill --enable-return-routed-experts --disaggregation-transfer-backend=nixl", 6),
    ],
)
def test_only_engines_that_send_experts_are_hooked(monkeypatch: pytest.MonkeyPatch, words: str, hooked: int) -> None:
    with engine_plugin() as load:
        hooks = load("server.prompt_experts")
        monkeypatch.setattr("sys.argv", ["launch_server.py", *words.split()])
        found: list[str] = []
        monkeypatch.setattr(hooks, "HookRegistry", SimpleNamespace(register=lambda target, *_: found.append(target)))
        monkeypatch.setattr(hooks, "HookType", SimpleNamespace(BEFORE=0, AFTER=1, AROUND=2))
        monkeypatch.setattr(hooks, "require", lambda *_: None)
        hooks.register()
        assert len(found) == hooked
        monkeypatch.setattr(hooks, "require", lambda target, parameters: _differs(hooks, target))
        if hooked:
            with pytest.raises(SystemExit, match=r"cannot send the experts of prompts with this SGLang: .* differs"):
                hooks.register()


def _differs(hooks: Any, target: str) -> None:
    raise hooks.OtherSGLangError(f"{target} differs")
