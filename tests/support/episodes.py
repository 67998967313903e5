"""Call a generate function, by default that of environments, against stand-in engines that answer by a function of the
conversation."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from slime.rollout import sglang_rollout
from slime.rollout.environments import generate
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer
from tests.support.rollout_args import rollout_args
from tests.support.standin import StandInCluster

Model = Callable[[list[str]], str]
"""From the texts of a conversation, prompt first, to the model's next turn."""


@contextmanager
def player(
    function: Callable[..., Any] = generate, custom: dict[str, Any] | None = None, **flags: Any
) -> Iterator[Callable[..., Any]]:
    """Yield ``play(model, sample, evaluation=False)``, which returns what ``function`` does.

    ``flags`` are attributes of the arguments, and ``custom`` are those of ``--custom-config-path``.
    """
    with (
        StandInCluster(1) as cluster,
        mock.patch.object(sglang_rollout, "load_tokenizer", return_value=ToolTokenizer()),
    ):
        SingletonMeta.clear_instances()
        args: Namespace = rollout_args(
            sglang_router_ip=cluster.host, sglang_router_port=cluster.port, apply_chat_template=False,
            rollout_max_response_len=flags.pop("rollout_max_response_len", 500), **flags,
        )  # fmt: skip
        vars(args).update(custom or {})
        with mock.patch.object(http_utils, "_http_client", None):
            http_utils.init_http_client(args)

            def play(model: Model, sample: Sample, evaluation: bool = False) -> Any:
                def reply(input_ids: list[int], params: dict[str, Any]) -> list[int]:
                    said = model(turns_of("".join(map(chr, input_ids))))
                    stops = [said.index(stop) + len(stop) for stop in params["stop"] or [] if stop in said]
                    return [ord(c) for c in (said[: min(stops)] if stops else said + END)]

                cluster.engines[0].reply = reply
                params = dict(sglang_rollout.GenerateState(args).sampling_params)
                return run(function(args, sample, params, evaluation))

            yield play
            run(http_utils._http_client.close())
        SingletonMeta.clear_instances()


def turns_of(text: str) -> list[str]:
    """Return what each message says, in order; the last one is the model's, as far as it has got."""
    return [part.partition("\n")[2].removesuffix(END) for part in text.split(BEGIN)[1:]]


def trained(sample: Sample) -> str:
    """Return the text of the tokens with loss mask 1."""
    tokens = sample.tokens[len(sample.tokens) - sample.response_length :]
    assert sample.loss_mask is not None
    return "".join(chr(token) for token, mask in zip(tokens, sample.loss_mask, strict=True) if mask)
