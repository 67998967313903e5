"""Do the engines compute what the trainer computes? Asked once, after the first push, with a fixed prompt.

Every later step answers it over all tokens that it trains on (``train/mismatch/mean``); this is before anything is
generated.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from slime.arguments.args import Args
from slime.ray.manager.engines.members import State
from slime.ray.manager.engines.served_model import ServedModel
from slime.servers.engine_client import EngineClient
from slime.servers.http import ServerError

logger = logging.getLogger(__name__)

TOKENS = tuple(range(3, 11)) * 4
"""Eight tokens, four times: a language model with its own weights is sure of the last three, one with others is not."""
TIMEOUT_S = 120.0


class CanaryError(RuntimeError):
    """Engines are further from the trainer than ``--mismatch-stop-threshold``; nothing has been generated."""


def ask(args: Args, models: Iterable[ServedModel]) -> dict[str, list[float]]:
    """Return by engine the log-probs that it gives ``TOKENS[1:]``; of those alone that get the trainer's weights.

    Prefill and decode engines are asked together, through their router. What does not answer is left out: it is found
    by other means.
    """
    asked: dict[str, tuple[str, str | None]] = {}
    for model in models:
        if model.update_weights and any(plan.worker_type == "prefill" for plan in model.plans):
            asked[f"the engines of model {model.name}"] = model.running_router.url, args.sglang_api_key
        elif model.update_weights:
            infos = [(str(member), member.known_info) for member in model.of(State.SERVING)]
            asked |= {name: (info.url, info.api_key) for name, info in infos}
    if not asked:
        return {}
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda name: _log_probs(name, *asked[name]), asked))
    return {name: answer for name, answer in zip(asked, answers, strict=True) if answer is not None}


def compare(args: Args, expected: Sequence[float], found: Mapping[str, Sequence[float]]) -> None:
    """Report how far the engines are from the trainer's log-probs ``expected``, on average over the tokens.

    Warns above ``--mismatch-alarm-threshold`` and raises CanaryError above ``--mismatch-stop-threshold``; NaN is above
    both.
    """
    means = {
        name: sum(abs(a - b) for a, b in zip(values, expected, strict=True)) / len(expected)
        for name, values in found.items()
    }
    if not means:
        return
    worst = max(means, key=lambda name: (means[name] != means[name], means[name]))
    message = (
        "after the first push, log-probs of a fixed prompt differ between trainer and engines by "
        f"{means[worst]:.2g} on average ({worst})"
    )
    limits = (("stop", args.mismatch_stop_threshold), ("alarm", args.mismatch_alarm_threshold or None))
    over = [(kind, limit) for kind, limit in limits if limit is not None and not means[worst] <= limit]
    if not over:
        logger.info("%s", message)
        return
    kind, limit = over[0]
    others = ", ".join(f"{name} {mean:.2g}" for name, mean in means.items())
    message = (
        f"{message}, more than --mismatch-{kind}-threshold {limit:g}: {others}. Engines may be built from other "
        "settings than the trainer (rope, norms, quantization), or miss part of the weights"
    )
    if kind == "stop":
        raise CanaryError(message)
    logger.warning("%s", message)


def _log_probs(name: str, url: str, api_key: str | None) -> list[float] | None:
    payload = {
        "input_ids": list(TOKENS),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    try:
        reply = EngineClient(url, api_key).generate(payload, TIMEOUT_S)
    except ServerError as e:
        logger.warning("%s is not compared with the trainer: %s", name, e)
        return None
    entries = (reply.get("meta_info") or {}).get("input_token_logprobs")
    if entries is None:
        logger.warning(
            "%s is not compared with the trainer: its reply has no meta_info.input_token_logprobs: %.300r", name, reply
        )
        return None
    # The first token has no log-prob; a number that is none is null.
    return [float("nan") if entry[0] is None else entry[0] for entry in entries[1:]]
