"""The router that is started, and its options."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import pytest

from slime.backends.sglang_utils.router import SMG_BALANCE, SMG_PATIENCE, choose_package, router_fields
from slime.backends.sglang_utils.router_main import router_options
from tests.support.arguments import known, run_args


def installed(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    known()  # looks for the packages whose flags there are
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name in packages else None)


def test_smg_is_the_default_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "sglang_router", "smg")
    for policy in ("cache_aware", "manual", "prefix_hash"):
        assert choose_package(run_args(router_policy=policy)) == "smg"
    installed(monkeypatch, "sglang_router")
    for policy in ("cache_aware", "manual", "consistent_hashing"):
        assert choose_package(run_args(router_policy=policy)) == "sglang_router"


def test_clients_that_name_models_have_the_router_that_takes_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "sglang_router", "smg")
    for changes in ({"serve_only": True}, {"rollout_buffer_url": "http://b"}):
        assert choose_package(run_args(**changes)) == "sglang_router"
        assert choose_package(run_args(**changes, sglang_router_package="smg")) == "smg"
        assert choose_package(run_args(**changes, router_policy="least_load")) == "smg"
    installed(monkeypatch, "smg")
    assert choose_package(run_args(serve_only=True)) == "smg"


def test_a_router_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "sglang_router", "smg")
    for package in ("smg", "sglang_router"):
        assert choose_package(run_args(sglang_router_package=package)) == package
    installed(monkeypatch)
    for package in ("smg", "sglang_router"):
        with pytest.raises(ValueError, match=f"--sglang-router-package {package}: it is not installed"):
            choose_package(run_args(sglang_router_package=package))


@pytest.mark.parametrize("policy", ["prefix_hash", "least_load"])
def test_a_policy_that_only_smg_has(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    installed(monkeypatch, "sglang_router", "smg")
    assert choose_package(run_args(router_policy="random", router_decode_policy=policy)) == "smg"
    with pytest.raises(ValueError, match=rf"{policy}.*`smg`.*--sglang-router-package says otherwise"):
        choose_package(run_args(router_policy=policy, sglang_router_package="sglang_router"))
    installed(monkeypatch, "sglang_router")
    with pytest.raises(ValueError, match=rf"{policy}.*`smg`.*not installed.*manual and consistent_hashing"):
        choose_package(run_args(router_policy=policy))


def test_prefill_and_decode_engines_need_smg(monkeypatch: pytest.MonkeyPatch) -> None:
    args = run_args()
    installed(monkeypatch, "sglang_router", "smg")
    assert choose_package(args, pd_disaggregation=True) == "smg"
    installed(monkeypatch, "sglang_router")
    with pytest.raises(ValueError, match=r"Prefill and decode engines need the router `smg`.*never answered"):
        choose_package(args, pd_disaggregation=True)


def test_without_any_router(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "smg")
    assert choose_package(run_args(router_policy="random")) == "smg"
    installed(monkeypatch)
    with pytest.raises(ValueError, match="No router is installed"):
        choose_package(run_args(router_policy="random"))


def test_smg_waits_for_engines_that_pause_and_gives_all_of_them_requests() -> None:
    fields = router_fields(run_args(), host="h", port=1, package="smg")
    assert {fields[name] for name in SMG_PATIENCE} == {14400}
    assert fields["worker_overload_protection"] is False
    assert (fields["load_monitor_interval"], fields["worker_warmup_secs"]) == (1, 0)
    assert not SMG_BALANCE.keys() & router_fields(run_args(), host="h", port=1).keys()


def test_data_parallel_ranks_can_be_workers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    args = run_args(router_dp_aware=True)
    assert router_fields(args, host="h", port=1, package="smg")["dp_aware"] is True
    installed(monkeypatch, "sglang_router", "smg")
    assert choose_package(run_args(router_dp_aware=True, serve_only=True)) == "smg"
    installed(monkeypatch, "sglang_router")
    with pytest.raises(ValueError, match=r"--router-dp-aware needs the router `smg`"):
        choose_package(args)


def test_only_flags_that_were_set_and_what_slime_decides() -> None:
    args = run_args(router_policy="manual", router_balance_abs_threshold=10, sglang_router_request_timeout_secs=77)
    assert router_fields(args, host="127.0.0.1", port=3000) == {
        "policy": "manual",
        "balance_abs_threshold": 10,
        "balance_rel_threshold": 1.2,
        "log_level": "warn",
        "host": "127.0.0.1",
        "port": 3000,
        "disable_circuit_breaker": True,
        "disable_health_check": True,
        "request_timeout_secs": 77,
        "shutdown_grace_period_secs": 1,
        "worker_startup_check_interval": 1,
    }


def test_requests_may_take_hours_by_default() -> None:
    assert router_fields(run_args(), host="h", port=1)["request_timeout_secs"] == 14400


def test_prefill_and_decode_workers_the_key_and_metrics() -> None:
    fields = router_fields(run_args(sglang_api_key="k"), host="h", port=1, prometheus_port=4000, pd_disaggregation=True)
    assert (fields["pd_disaggregation"], fields["disable_retries"], fields["api_key"]) == (True, True, "k")
    assert (fields["prometheus_port"], fields["prometheus_host"]) == (4000, "h")


def test_what_was_set_wins_over_what_slime_would_choose() -> None:
    args = run_args(
        router_shutdown_grace_period_secs=20, router_worker_startup_check_interval=5, router_prometheus_host="h2"
    )
    fields = router_fields(args, host="h", port=1, prometheus_port=4000)
    assert fields["shutdown_grace_period_secs"] == 20
    assert fields["worker_startup_check_interval"] == 5
    assert fields["prometheus_host"] == "h2"


@dataclass
class FakeRouterArgs:
    host: str = "0.0.0.0"
    policy: str = "random"


def test_options_reach_the_routers_own_class() -> None:
    assert router_options(FakeRouterArgs, {"policy": "manual"}) == FakeRouterArgs(policy="manual")
    with pytest.raises(ValueError, match=r"no option polic; it has: host, policy"):
        router_options(FakeRouterArgs, {"polic": "manual"})
