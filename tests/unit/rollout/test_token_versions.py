"""Every trained token against the books of the engines: what it is, which weights made it, whether it is trained on."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.batching.train_data import build_train_data
from slime.ray.manager import rollout_metrics
from slime.ray.manager.rollout_metrics import staleness_metrics
from slime.rollout import fully_async_rollout, group_stream
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.requests import generate_request
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.staleness import WeightClock
from slime.servers import http_client, http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args, write_prompts
from tests.support.versioned_engine import VersionedCluster

pytestmark = pytest.mark.slow

ROLLOUTS = 6


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WeightClock:
    fresh = WeightClock()
    for module in (group_stream, rollout_metrics):
        monkeypatch.setattr(module, "weight_clock", lambda: fresh)
    return fresh


Start = Callable[..., tuple[VersionedCluster, SimpleNamespace, RolloutDataSourceWithBuffer]]


@pytest.fixture
def start(tokenizer: Any, clock: WeightClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return running engines, arguments that point to them, and a data source."""
    SingletonMeta.clear_instances()
    monkeypatch.setattr(http_utils, "_http_client", None)
    monkeypatch.setattr(generate_request, "RESUME_PAUSE_S", 0.0)
    monkeypatch.setattr(http_client, "BACKOFF_BASE_S", 0.01)
    clusters: list[VersionedCluster] = []

    def begin(
        seed: int, *, gate: bool, **changes: Any
    ) -> tuple[VersionedCluster, SimpleNamespace, RolloutDataSourceWithBuffer]:
        lengths = random.Random(seed)
        cluster = VersionedCluster(
            2, seed, says_spans=changes.pop("says_spans", True), rate=changes.pop("rate", 0.0),
            length=lambda: min(200, int(lengths.lognormvariate(3.0, 1.0)) + 1),
        )  # fmt: skip
        cluster.weights.last_gate = ROLLOUTS if gate else 0
        clusters.append(cluster.__enter__())
        args = rollout_args(
            prompt_data=str(write_prompts(tmp_path / "prompts.jsonl", 50)), sglang_router_ip=cluster.host,
            sglang_router_port=cluster.port, sglang_server_concurrency=8, rollout_max_response_len=300,
            over_sampling_batch_size=8, **changes,
        )  # fmt: skip
        http_utils.init_http_client(args)
        return cluster, args, RolloutDataSourceWithBuffer(args)

    yield begin
    fully_async_rollout.stop_global_worker()
    for cluster in clusters:
        if http_utils._http_client is not None:
            run(http_utils._http_client.close())
        cluster.__exit__()
    SingletonMeta.clear_instances()


class Books:
    """The trainer's data, compared with the work of the engines. Version v holds the weights of step v - 1."""

    def __init__(self, cluster: VersionedCluster, args: SimpleNamespace, clock: WeightClock) -> None:
        self.cluster, self.args, self.clock = cluster, args, clock
        self.trained: Counter[int] = Counter()
        self.groups: Counter[int] = Counter()
        self.crossing = 0

    def check(self, rollout_id: int, groups: list[list[Sample]], is_trained: Callable[[list[int], int], bool]) -> None:
        """``is_trained(serial numbers of a response, position)`` says which tokens the loss should cover."""
        samples = list(iter_samples(groups))
        self.groups.update(group[0].group_index for group in groups)
        data = build_train_data(self.args, samples, [0.0] * len(samples), [0.0] * len(samples))
        lags: Counter[int] = Counter()
        for i, sample in enumerate(samples):
            length = data["response_lengths"][i]
            serials = [round(-log_prob) for log_prob in data["rollout_log_probs"][i]]
            made = [self.cluster.weights.made[serial] for serial in serials]
            assert data["tokens"][i][:-length] == [ord(c) for c in sample.prompt]
            assert data["tokens"][i][-length:] == [token for token, _ in made]
            mask = list(data["loss_masks"][i])
            assert mask == [int(is_trained(serials, t)) for t in range(length)], (sample.index, made)
            self.crossing += len({version for _, version in made}) > 1
            self.check_spans(sample, [version for _, version in made])
            for serial, (_, version), trained in zip(serials, made, mask, strict=True):
                if trained:
                    self.trained[serial] += 1
                    lags[rollout_id - (version - 1)] += 1
        if self.args.max_staleness is not None:
            assert max(lags, default=0) <= self.args.max_staleness
        found = staleness_metrics(samples, rollout_id)
        total = sum(lags.values())
        if self.cluster.engines[0].says_spans and total:
            assert found["rollout/staleness/max"] == max(lags)
            assert [found.get(f"rollout/staleness/lag_{k}", 0.0) for k in range(4)] == pytest.approx(
                [lags[k] / total for k in range(4)]
            )
        elif total:
            assert found["rollout/staleness/max"] >= max(lags)

    def check_spans(self, sample: Sample, versions: list[int]) -> None:
        spans = sample.weight_version_spans
        assert [t for span in spans for t in range(span["start"], span["end"])] == list(range(len(versions)))
        for span in spans:
            steps = {version - 1 for version in versions[span["start"] : span["end"]]}
            if span.get("at_end"):
                assert span.get("step", min(steps)) <= min(steps)
            else:
                assert {int(span["version"]) - 1} == steps == {span.get("step", min(steps))}


def train(
    function: Any, cluster: VersionedCluster, clock: WeightClock, args: Any, source: Any, check: Any, mode: str,
    ahead: bool,
) -> None:  # fmt: skip
    """Run the loop of train.py, or with ``ahead`` that of train_async.py with the fully asynchronous rollout."""
    cluster.push(1)
    clock.publish(1, 0)
    found: dict[int, Any] = {}

    def rollout(rollout_id: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.update({rollout_id: function(args, rollout_id, source)}))
        thread.start()
        return thread

    upcoming = rollout(0)
    for rollout_id in range(ROLLOUTS):
        upcoming.join(60)
        check(rollout_id, found[rollout_id].samples)
        if ahead and rollout_id + 1 < ROLLOUTS:
            upcoming = rollout(rollout_id + 1)
        cluster.push(rollout_id + 2, mode)
        clock.publish(rollout_id + 2, rollout_id + 1)
        if not ahead and rollout_id + 1 < ROLLOUTS:
            upcoming = rollout(rollout_id + 1)


@pytest.mark.parametrize(
    ("limit", "masked", "mode", "says_spans"),
    [
        (1, False, "retract", True),
        (2, True, "retract", True),
        (2, False, "abort", True),
        (None, False, "retract", True),
        (1, True, "abort", True),
        (1, False, "retract", False),
        (2, True, "retract", False),
        (None, True, "abort", False),
    ],
)
def test_fully_asynchronous_tokens_are_what_the_engines_made(start, clock, limit, masked, mode, says_spans):
    cluster, args, source = start(
        7, gate=True, max_staleness=limit, partial_rollout=masked, mask_offpolicy_in_partial_rollout=masked,
        says_spans=says_spans, rate=0.01,
    )  # fmt: skip
    books = Books(cluster, args, clock)
    made = cluster.weights.made

    def newest(serials: list[int], position: int) -> bool:
        return not masked or made[serials[position]][1] == made[serials[-1]][1]

    def check(rollout_id: int, groups: Any) -> None:
        if masked and not says_spans:  # where the engine does not tell, less is trained on, but nothing older
            masks = {id(s): list(s.loss_mask or []) for s in iter_samples(groups)}
            position = {round(-s.rollout_log_probs[0]): masks[id(s)] for s in iter_samples(groups)}
            for sample in iter_samples(groups):
                serials = [round(-log_prob) for log_prob in sample.rollout_log_probs]
                assert all(newest(serials, t) for t, m in enumerate(sample.loss_mask) if m)
            books.check(rollout_id, groups, lambda serials, t: bool(position[serials[0]][t]))
        else:
            books.check(rollout_id, groups, newest)

    train(generate_rollout_fully_async, cluster, clock, args, source, check, mode, ahead=True)
    left = run(fully_async_rollout.get_global_worker(args, source).close())
    seen = books.groups + Counter(group[0].group_index for group in [*left, *source.buffer])
    assert seen == Counter(range(source.sample_group_index))
    assert max(books.trained.values()) == 1


@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_a_response_that_lives_through_a_push_says_which_weights_made_what(start, clock, mode):
    cluster, args, source = start(5, gate=True, max_staleness=None)
    cluster.weights.last_gate, cluster.weights.gate_turns = 2, 10**6
    cluster.push(1)
    clock.publish(1, 0)
    worker = fully_async_rollout.get_global_worker(args, source)
    worker.start()
    cluster.wait_until(lambda: cluster.weights.gated, "a request waits for a push", 30)
    cluster.push(2, mode)
    clock.publish(2, 1)
    books = Books(cluster, args, clock)
    for rollout_id in range(1, 20):
        books.check(rollout_id, generate_rollout_fully_async(args, rollout_id, source).samples, lambda serials, t: True)
        if books.crossing:
            break
    assert books.crossing > 0


@pytest.mark.parametrize(
    ("limit", "partial", "masked", "says_spans"),
    [
        (0, False, False, True),
        (0, True, False, True),
        (1, True, False, True),
        (0, True, True, True),
        (None, True, True, True),
        (1, True, False, False),
    ],
)
def test_tokens_of_the_default_rollout_are_what_the_engines_made(start, clock, limit, partial, masked, says_spans):
    cluster, args, source = start(
        3, gate=True, max_staleness=limit, partial_rollout=partial, mask_offpolicy_in_partial_rollout=masked,
        says_spans=says_spans, rate=0.01,
    )  # fmt: skip
    books = Books(cluster, args, clock)
    made = cluster.weights.made

    def check(rollout_id: int, groups: Any) -> None:
        version = rollout_id + 1
        books.check(rollout_id, groups, lambda serials, t: not masked or made[serials[t]][1] == version)

    train(generate_rollout, cluster, clock, args, source, check, "abort", ahead=False)
    seen = books.groups + Counter(group[0].group_index for group in source.buffer)
    assert seen == Counter(range(source.sample_group_index))
    assert max(books.trained.values()) == 1
