"""Products of the trainer in FP8: passed on where TransformerEngine computes, refused with one sentence elsewhere."""

from __future__ import annotations

import pytest

from slime.arguments.device import finalize_for_device
from slime.arguments.errors import ArgumentError
from tests.support.arguments import parse

BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise"


def test_it_is_what_the_recipes_ask_for(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse(*f"--bf16 --transformer-impl transformer_engine {BLOCKWISE} --fp8-param-gather".split())
    assert (args.fp8, args.fp8_recipe, args.transformer_impl) == ("e4m3", "blockwise", "transformer_engine")
    assert "--fp8-param-gather has no effect: weights are kept and gathered in bf16" in capsys.readouterr().err
    assert (args.fp8_param_gather, args.fp8_param) == (False, False)
    finalize_for_device(args, "cuda")
    assert args.fp8 == "e4m3"


def test_it_needs_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="--fp8-format needs a GPU and there is none; leave it out"):
        finalize_for_device(parse(*BLOCKWISE.split()), "cpu")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--fp8-recipe blockwise", "--fp8-recipe says how --fp8-format computes, which is not given"),
        ("--no-fp8-wgrad", "--no-fp8-wgrad says how --fp8-format computes"),
        ("--num-layers-at-end-in-bf16 2", "--num-layers-at-end-in-bf16 says how --fp8-format computes"),
        ("--fp8-param-gather", "--fp8-param-gather says how --fp8-format computes"),
        (
            f"{BLOCKWISE} --transformer-impl local",
            "--fp8-format e4m3: TransformerEngine .* --transformer-impl is local",
        ),
        (f"{BLOCKWISE} --fp16", "--fp8-format e4m3 goes with weights in bf16, got --fp16"),
        (f"{BLOCKWISE} --data-pad-size-multiplier 64", "needs tokens in multiples of 128: .* is 64; give a multiple"),
        ("--fp8-format hybrid --fp8-recipe mxfp8 --data-pad-size-multiplier 16", "tokens in multiples of 32"),
        ("--fp8-format hybrid --data-pad-size-multiplier 8", "--fp8-recipe delayed needs tokens in multiples of 16"),
    ],
)
def test_what_cannot_be_computed_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        parse(*words.split())


def test_engines_alone_need_none_of_it() -> None:
    assert parse("--debug-rollout-only", *BLOCKWISE.split(), "--transformer-impl", "local").fp8 == "e4m3"
