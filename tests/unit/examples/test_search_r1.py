"""The search engine against brute force, and masks and rewards of episodes with it."""

from __future__ import annotations

import asyncio
import json
import math
import random

import aiohttp
import pytest
import yaml

from examples.search_r1.answers import normalized, targets
from examples.search_r1.environment import INVALID
from examples.search_r1.make_data import document, facts, make_data
from examples.search_r1.retrieval_server import Index, application
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.utils.types import Sample
from tests.support.agents import END
from tests.support.episodes import player, trained


def brute_force(documents: list[str], query: str) -> list[float]:
    """BM25 of every document, straight from the formula, k1 = 1.2 and b = 0.75."""
    split = [text.split() for text in documents]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for text in split:
        total = 0.0
        for word in query.split():
            n = sum(word in other for other in split)
            idf = math.log(1 + (len(split) - n + 0.5) / (n + 0.5))
            times = text.count(word)
            total += idf * times * 2.2 / (times + 1.2 * (0.25 + 0.75 * len(text) / mean))
        scores.append(total)
    return scores


def test_the_index_agrees_with_brute_force():
    rng = random.Random(0)
    texts = [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 12))) for _ in range(60)]
    index = Index([{"id": i, "contents": text} for i, text in enumerate(texts)])
    for _ in range(100):
        query = " ".join(rng.choices("abcdefghi", k=rng.randint(1, 3)))
        expected = brute_force(texts, query)
        best = sorted((i for i, score in enumerate(expected) if score), key=lambda i: (-expected[i], i))[:5]
        found = index.search(query, 5)
        assert [score for _, score in found] == pytest.approx([expected[i] for i in best])
        ties = len({round(expected[i], 9) for i in best}) < len(best)
        assert ties or [hit["id"] for hit, _ in found] == best


@pytest.fixture
def server():
    known = facts()
    handle = run_app_in_thread(application(Index([document(*fact) for fact in known.items()])), host="127.0.0.1")
    yield f"http://127.0.0.1:{handle.port}"
    handle.stop()


def test_the_servers_answers(server):
    place, thing = next(iter(facts().items()))

    async def ask(body: object) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.post(f"{server}/retrieve", json=body) as reply:
            return reply.status, await reply.text()

    status, text = asyncio.run(ask({"queries": [place, "nowhere"], "topk": 2, "return_scores": True}))
    found = json.loads(text)["result"]
    assert status == 200
    assert found[0][0]["document"] == {"id": place, "contents": f'"{place}"\n{place} has {thing}'}
    assert found[0][0]["score"] > 0
    assert found[1] == []
    assert json.loads(asyncio.run(ask({"queries": [place], "topk": 1}))[1])["result"][0][0]["id"] == place
    assert asyncio.run(ask({"queries": "text"}))[0] == 400


def config(tmp_path, url: str, **fields: object) -> str:
    entry = {"path": "examples.search_r1.environment.Search", "name": "search", "max_turns": 2,
             "options": {"url": f"{url}/retrieve", "topk": 1}, **fields}  # fmt: skip
    path = tmp_path / "search.yaml"
    path.write_text(yaml.safe_dump({"environments": [entry]}))
    return str(path)


def searches(turns: list[str]) -> str:
    """Search, then answer with the last word of what was found."""
    if "</information>" in turns[-1]:
        return f"<answer>{turns[-1].partition('</information>')[0].split()[-1]}</answer>"
    return f"<search>{turns[0]}</search> and more"


def test_an_episode_with_a_search(server, tmp_path):
    place, thing = next(iter(facts().items()))
    given = Sample(index=0, prompt=[{"role": "user", "content": place}], label={"ground_truth": {"target": [thing]}})
    with player(environment_config=config(tmp_path, server), rollout_stop=["</search>"]) as play:
        found = play(searches, given)
    information = f"\n\n<information>Doc 1(Title: {place}) {place} has {thing}\n</information>\n\n"
    assert found.response == f"<search>{place}</search>{information}<answer>{thing}</answer>{END}"
    assert trained(found) == f"<search>{place}</search><answer>{thing}</answer>{END}"
    assert found.reward == 1.0


def test_a_wrong_answer_and_no_action(server, tmp_path):
    given = {"prompt": [{"role": "user", "content": "x"}], "label": "right"}
    with player(environment_config=config(tmp_path, server)) as play:
        assert play(lambda turns: "<answer>wrong</answer>", Sample(index=0, **given)).reward == 0.0
        lost = play(lambda turns: "hm", Sample(index=1, **given))
    assert lost.status == Sample.Status.TRUNCATED
    assert lost.reward == 0.0
    assert lost.response == f"hm{END}{INVALID}hm{END}"
    assert trained(lost) == f"hm{END}" * 2


def test_a_server_that_is_gone_aborts_the_sample(tmp_path):
    given = Sample(index=0, prompt=[{"role": "user", "content": "x"}], label="y")
    with player(environment_config=config(tmp_path, "http://127.0.0.1:9", step_timeout=0.3)) as play:
        lost = play(searches, given)
    assert lost.status == Sample.Status.ABORTED
    assert lost.reward is None
    assert lost.metadata["abort_reason"].startswith("search.step.")


@pytest.mark.parametrize(
    ("one", "other"), [("The  Beatles!", "beatles"), ("an apple, a day", "apple day"), ("U.S.", "us"), ("then", "then")]
)
def test_answers_are_compared_as_squad_does(one, other):
    assert normalized(one) == other


def test_labels():
    assert targets("a") == ["a"]
    assert targets(["a", 2]) == ["a", "2"]
    assert targets({"ground_truth": {"target": ["a", "b"]}}) == ["a", "b"]


@pytest.mark.slow
def test_the_data(tmp_path):
    make_data(tmp_path, seed=1, demonstrations=1000)
    rows = {f.stem: [json.loads(line) for line in f.read_text().splitlines()] for f in tmp_path.glob("*.jsonl")}
    asked = {name: {row["messages"][0]["content"] for row in rows[name]} for name in ("sft", "train", "facts")}
    assert not asked["facts"] & (asked["sft"] | asked["train"])
    assert asked["facts"] | asked["train"] == {row["id"] for row in rows["corpus"]}
    things = {row["contents"].split()[-1] for row in rows["corpus"]}
    assert len(things) > 50
    for row in rows["facts"]:
        assert row["label"] == facts()[row["messages"][0]["content"]]
