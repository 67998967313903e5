"""Engines that others started: found out, attached, lost, attached again, left."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError
from slime.arguments.placement import EnginePlan
from slime.backends.sglang_utils.external import (
    NoAnswerError,
    apply_external_engine_info_to_args,
    discover_external_engines,
    external_engine_infos_from_args,
    normalize_external_engine_addr,
)
from slime.backends.sglang_utils.router import RunningRouter
from slime.ray.manager.engines import external
from slime.ray.manager.engines import fleet as engine_fleet
from slime.ray.manager.engines import lifecycle as engine_lifecycle
from slime.ray.manager.engines.fleet import EngineFleet
from slime.ray.manager.engines.members import State
from slime.servers.types import EngineInfo
from slime.weight_sync import WeightSyncError, resolve_pause_mode, steps
from tests.support.arguments import CONFIG
from tests.support.external_engine import ExternalServer
from tests.support.fake_fleet import PATIENCE_S, Router, World, infos, push
from tests.support.http_stub import Reply, Seen, http_stub
from tests.support.standin_fleet import Events, fleet_args

KEY = "a-key"


@pytest.fixture
def servers() -> Iterator[Callable[..., ExternalServer]]:
    """Makes servers that run until the test ends."""
    made: list[ExternalServer] = []

    def make(**settings: Any) -> ExternalServer:
        args = fleet_args(1)
        made.append(ExternalServer(**{"model_path": str(args.hf_checkpoint), **settings}))
        made[-1].start()
        return made[-1]

    yield make
    for server in made:
        server.die()


def args_for(*servers: ExternalServer, **changes: Any) -> Any:
    addresses = [server.url.removeprefix("http://") for server in servers]
    values = {"rollout_external": True, "rollout_external_engine_addrs": addresses, "engine_ready_timeout": 30.0}
    return fleet_args(1, **{**values, **changes})


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """Makes a fleet over servers, started; keyword arguments replace those of the run."""
    monkeypatch.setattr(engine_fleet, "WATCH_INTERVAL_S", 10_000.0)  # tests look for themselves
    monkeypatch.setattr(engine_lifecycle, "RETRY_DELAY_S", 0.01)
    monkeypatch.setattr(engine_lifecycle, "WAIT_POLL_S", 0.01)
    monkeypatch.setattr(external, "GENERATE_POLL_S", 0.01)
    monkeypatch.setattr(engine_fleet, "spans_one_host", lambda: True)
    router = Router()
    monkeypatch.setattr(EngineFleet, "_router", lambda self, model, host: router)
    fleets = []

    def make(*servers: ExternalServer, **changes: Any) -> World:
        args = args_for(*servers, **{"rollout_health_check_interval": 10_000.0, **changes})
        apply_external_engine_info_to_args(args, discover_external_engines(args))
        events = Events()
        fleets.append(EngineFleet(args, (None, [], []), {}, events))
        fleets[-1].start()
        return World(fleets[-1], {"default": router}, events)

    yield make
    for fleet in fleets:
        fleet.stop()


def look(run: World, times: int = external.LOST_CONNECTIONS) -> None:
    """As the watcher does."""
    for _ in range(times):
        run.fleet.reap_exited()


# Discovery


def test_what_engines_are_is_asked_and_noted(servers: Any) -> None:
    one, two = servers(), servers(tp_size=2, pp_size=2, ep_size=2)
    args = args_for(one, two, rollout_num_gpus=77)
    found = discover_external_engines(args)
    assert [(info.num_gpus, info.worker_type) for info in found] == [(1, "regular"), (4, "regular")]
    assert found[1].parallel_config == {"tp": 2, "pp": 2, "ep": 2, "moe_dp": 1}
    assert (found[0].host, found[0].port, found[0].is_pd_worker) == ("127.0.0.1", one.port, False)
    assert str(found[0]).startswith(f"{one.url} (SGLang 0.5.20, {args.hf_checkpoint}, tp 1")
    apply_external_engine_info_to_args(args, found)
    assert (args.rollout_num_engines, args.rollout_num_gpus) == (2, 5)
    json.dumps(args.rollout_external_engine_infos)
    assert external_engine_infos_from_args(args) == found
    plans = external.external_plans(args)
    assert [(plan.gpu_offset, plan.num_gpus, plan.url) for plan in plans] == [(0, 1, one.url), (1, 4, two.url)]
    assert str(plans[1]) == "external engine 1"


def test_a_server_that_knows_any_process_group_is_left_all_the_same() -> None:
    asked: list[str] = []

    class Obliging:
        def destroy_weights_update_group(self, group_name: str) -> None:
            asked.append(group_name)
            assert len(asked) < 1000

    engine = external.ExternalEngine(args_for(), EnginePlan(0, 0, 1, 1, 1, url="http://h:1"), None)
    engine._leave_groups(Obliging())  # type: ignore[arg-type]
    assert asked[:2] == ["slime-pp_0", "slime-pp_1"]


def test_prefill_and_decode_engines(servers: Any, attached: Any) -> None:
    """They are registered as what they are, and the run needs both kinds, of one transport, to start."""
    settings = {"disaggregation_transfer_backend": "mooncake", "page_size": 1}
    prefill = servers(disaggregation_mode="prefill", disaggregation_bootstrap_port=8999, **settings)
    decode = servers(disaggregation_mode="decode", **settings)
    run = attached(prefill, decode, use_fault_tolerance=True)
    found = {info.worker_type: info for info in infos(run)}
    assert found["prefill"].bootstrap_port == 8999
    assert found["decode"].url == decode.url
    assert run.fleet.models[0].answers(State.SERVING)
    assert run.fleet.args.sglang_model_engines == {"default": 1}  # of those that hold requests until the end

    decode.die()
    look(run)
    assert not run.fleet.models[0].answers(State.SERVING)
    decode.server["disaggregation_mode"] = "prefill"
    decode.restart()
    time.sleep(0.2)
    assert run.member(1).state is State.DEAD
    decode.server["disaggregation_mode"] = "decode"
    run.wait_for(1, State.NEW)

    regular = servers()
    with pytest.raises(
        ArgumentError, match=r"names decode and prefill and regular engines: .* no requests beside them"
    ):
        discover_external_engines(args_for(prefill, decode, regular))
    decode.server["page_size"] = 64
    with pytest.raises(ArgumentError, match=r"differ in page_size \(1, 64\)"):
        discover_external_engines(args_for(prefill, decode))


def test_addresses_become_urls() -> None:
    for addr in ("h:1", "http://h:1", "http://h:1/"):
        assert normalize_external_engine_addr(addr) == "http://h:1"
    assert normalize_external_engine_addr("[fe80::1]:3") == "http://[fe80::1]:3"
    with pytest.raises(ValueError, match="host:port"):
        normalize_external_engine_addr("https://h:1")


def checkpoint(folder: Path, **changes: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def test_an_engine_of_another_model_is_refused(servers: Any, tmp_path: Path) -> None:
    larger = servers(model_path=checkpoint(tmp_path / "larger", hidden_size=128))
    family, good = servers(model_path="/there/llama"), servers(model_path=checkpoint(tmp_path / "copy"))
    family.model["model_type"] = "llama"
    with pytest.raises(ArgumentError) as caught:
        discover_external_engines(args_for(larger, family, good))
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        f"--rollout-external-engine-addrs {larger.url}: it serves {tmp_path}/larger, which is anoth"
    )
    assert first.endswith(": hidden_size is 128, not 64")
    assert second.endswith("model_type is llama, not qwen3")


@pytest.mark.parametrize(
    ("settings", "flags", "words"),
    [
        ({"encoder_only": True}, {}, "it is an encoder engine, which takes no weights"),
        ({"disaggregation_mode": "decode"}, {}, "names decode engines: prefill and decode engines need each other"),
        (
            {"disaggregation_mode": "prefill"},
            {"weight_sync_pause_mode": "retract"},
            "prefill engines need --weight-sync-pause-mode abort",
        ),
        (
            {"disaggregation_mode": "decode", "enable_return_routed_experts": True},
            {"use_rollout_routing_replay": True},
            "--use-rollout-routing-replay needs the run's own decode engines",
        ),
        ({"quantization": "fp8"}, {}, "--quantization fp8, and pushes of weights are not quantized"),
        ({"dp_size": 2}, {}, "start one server per copy"),
        ({"dp_size": 2}, {"update_weight_transport": "disk"}, None),
        ({"dp_size": 2, "enable_dp_attention": True}, {}, None),
        ({}, {"weight_sync_pause_mode": "in_place"}, "started with --disable-radix-cache"),
        ({"disable_radix_cache": True}, {"weight_sync_pause_mode": "in_place"}, None),
        ({}, {"use_rollout_routing_replay": True}, "started with --enable-return-routed-experts"),
        ({"quantization": "fp8"}, {"debug_rollout_only": True}, None),
    ],
)
def test_settings_that_the_run_cannot_work_with(servers: Any, settings: Any, flags: Any, words: str | None) -> None:
    args = args_for(servers(**settings), **flags)
    if words is None:
        assert len(discover_external_engines(args)) == 1
        return
    with pytest.raises(ArgumentError, match=re.escape(words)):
        discover_external_engines(args)


def test_flags_that_do_not_reach_the_engine_are_named(servers: Any, caplog: Any) -> None:
    args = args_for(servers(mem_fraction_static=0.8, api_key="other", context_length=9))
    args.explicit_flags = {"sglang_mem_fraction_static", "sglang_api_key", "sglang_context_length"}
    args.sglang_mem_fraction_static, args.sglang_context_length = 0.5, 9
    with caplog.at_level(logging.WARNING):
        discover_external_engines(args)
    assert "with settings of its own, not --sglang-mem-fraction-static 0.5 (it has 0.8)\n" in caplog.text


def test_no_engine_there_and_keys(servers: Any) -> None:
    server = servers(key=KEY)
    with pytest.raises(ArgumentError, match="it asks for another key than that of --sglang-api-key"):
        discover_external_engines(args_for(server))
    assert discover_external_engines(args_for(server, sglang_api_key=KEY))
    server.die()
    with pytest.raises(NoAnswerError, match="no engine answers there; start it first"):
        external.inspect(args_for(server), server.url, KEY)


# Attached


def test_engines_are_attached_and_left_as_they_are(attached: Any, servers: Any) -> None:
    one, two = servers(key=KEY), servers(key=KEY, tp_size=2)
    one.paused = True  # a run that was killed has left it so
    run = attached(one, two, sglang_api_key=KEY)
    assert run.router.engines == [one.url, two.url]
    assert [(info.num_gpus, info.gpu_offset, info.api_key) for info in infos(run)] == [(1, 0, KEY), (2, 1, KEY)]
    assert run.fleet.args.sglang_model_engines == {"default": 2}
    assert one.groups == []
    look(run, 5)
    assert push(run) == [one.url, two.url]
    one.groups, before = ["slime-pp_0", "slime-pp_1"], set(one.calls)
    run.fleet.stop()
    assert run.router.stopped
    assert one.groups == []
    assert set(one.calls) == before == {"continue_generation", "destroy_weights_update_group"}
    assert discover_external_engines(run.fleet.args)
    assert one.unauthorized == two.unauthorized == 0


def test_weights_through_files(attached: Any, servers: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two)
    one.calls.clear()
    run.fleet.offer()
    steps.load_files(run.fleet.args, run.fleet.offered, "/shared/weight_v000004", 4, pause_mode="abort")
    assert one.version == two.version == "4"
    load = "update_weights_from_disk /shared/weight_v000004"
    assert one.calls == ["pause_generation", "flush_cache", load, "continue_generation"]
    assert resolve_pause_mode(run.fleet.args, synchronous_loop=False) == "abort"
    two.blind = True
    with pytest.raises(
        WeightSyncError, match=rf"(?s)hosts must share with the trainers\) on 1 of 2 engines.*{two.url}"
    ):
        steps.load_files(run.fleet.args, run.fleet.offered, "/shared/weight_v000005", 5, pause_mode="abort")


def test_without_the_flag_a_lost_engine_stays_away(attached: Any, servers: Any, caplog: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two)
    one.die()
    look(run, external.LOST_CONNECTIONS - 1)
    assert run.member(0).state is State.SERVING
    look(run, 1)
    assert run.router.engines == [two.url]
    assert f"external engine 0 ({one.url}) accepts no connections any more" in caplog.text
    assert "With --use-fault-tolerance it would be attached again when it answers." in caplog.text
    assert push(run) == [two.url]
    one.start()
    look(run)
    assert run.router.engines == [two.url]
    assert not run.events.failed.is_set()
    two.die()
    look(run)
    assert run.events.failure is not None
    assert "No engine is left. With --use-fault-tolerance an engine is attached again" in str(run.events.failure)


def test_a_lost_engine_is_attached_again_and_gets_weights_before_requests(attached: Any, servers: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two, use_fault_tolerance=True)
    first = run.fleet.offer()
    one.die()
    assert run.fleet.recover() == 0  # of a push: it has looked, and does not wait while another lives
    assert push(run) == [two.url]
    assert run.router.engines == [two.url]
    one.start()
    run.wait_for(0, State.NEW)
    assert run.router.engines == [two.url]
    assert run.fleet.recover() == 1
    again = run.fleet.offer()
    assert [info.url for info in again] == [info.url for info in first]
    assert again != first  # channels to the one that has ended are of no use
    run.fleet.admit()
    assert sorted(run.router.engines) == sorted([one.url, two.url])
    assert run.fleet.counts() == {
        "rollout/engines/serving": 2, "rollout/engines/lost": 1, "rollout/engines/restarted": 1,
    }  # fmt: skip


def test_one_that_others_restarted_has_the_weights_of_its_checkpoint(attached: Any, servers: Any, caplog: Any) -> None:
    server = servers()
    run = attached(server, use_fault_tolerance=True)
    server.version = "3"
    look(run, 1)
    server.version = "4"
    look(run, 1)
    assert run.member(0).state is State.SERVING
    server.restart()
    look(run, 1)
    assert "was restarted by others: its weight version is default, and was 4." in caplog.text
    assert run.router.engines == []
    assert run.events.need.wait(PATIENCE_S)
    assert run.fleet.recover() == 1
    assert push(run) == [server.url]
    assert run.router.engines == [server.url]


def test_another_model_at_the_address_is_not_attached(attached: Any, servers: Any, caplog: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two, use_fault_tolerance=True)
    one.die()
    look(run)
    right = one.model["model_type"]
    one.model["model_type"], one.server["model_path"] = "llama", "/there/llama"
    one.start()
    for _ in range(500):
        if "external engine 0 cannot be attached again" in caplog.text:
            break
        time.sleep(0.01)
    time.sleep(0.1)
    assert caplog.text.count("model_type is llama, not qwen3") == 1
    one.model["model_type"] = right
    run.wait_for(0, State.NEW)


def test_a_push_waits_for_one_when_all_are_away(attached: Any, servers: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two, use_fault_tolerance=True)
    one.die()
    two.die()
    look(run)
    assert run.router.engines == []
    two.start()
    assert run.fleet.recover() == 1
    assert push(run) == [two.url]
    assert not run.events.failed.is_set()


def test_the_run_ends_when_none_is_back_in_time(attached: Any, servers: Any) -> None:
    one, two = servers(), servers()
    run = attached(one, two, use_fault_tolerance=True, engine_ready_timeout=0.3)
    one.die()
    look(run)
    time.sleep(0.5)
    assert not run.events.failed.is_set()  # the other one works
    two.die()
    look(run)
    assert run.events.failed.wait(PATIENCE_S)
    assert re.search(r"no engine is left: .* has not been back for 0.3 s \(--engine-ready", str(run.events.failure))


def test_a_shared_router_keeps_the_engines_that_were_there() -> None:
    listed = ["http://h:1"]

    def answer(seen: Seen) -> Reply:
        if seen.method == "POST":
            listed.append(seen.body["url"])
        if seen.method == "DELETE":
            listed.remove("http://" + seen.path.removeprefix("/workers/"))
        workers = [{"id": url.removeprefix("http://"), "url": url, "is_healthy": True} for url in listed]
        return 200, {"workers": workers}

    there, added = EngineInfo("http://h:1", life=1), EngineInfo("http://h:2", life=2)
    with http_stub(answer) as stub:
        host, port = stub.url.removeprefix("http://").split(":")
        router = RunningRouter(fleet_args(1, sglang_router_ip=host, sglang_router_port=int(port)))
        router.add_engine(there)
        router.add_engine(added)
        assert listed == [there.url, added.url]
        router.remove_engine(there)  # lost, and back
        router.add_engine(there)
        router.stop()
        assert listed == [there.url]
