"""``--megatron-config-path``: what differs for the actor and the critic."""

from __future__ import annotations

from argparse import Namespace

import pytest

from slime.arguments.rules.roles import CRITIC_VALUES, read_roles
from slime.utils.arguments import parse_megatron_role_args
from tests.support.arguments import dry


def roles_of(write, text, role):
    base = dry("--kl-coef", 0.1)
    base.my_rate = 0.5
    return base, parse_megatron_role_args(base, write(text), role)


def test_overrides_are_typed_and_the_base_is_untouched(write):
    text = (
        "megatron:\n- {name: default, role: actor, overrides: {lr: '1e-5', num-nodes: 9, my_own: x, my-rate: '2e-1', "
        "rollout_stop: END}}"
    )
    base, actor = roles_of(write, text, "actor")
    assert (base.lr, actor.lr, actor.my_own, actor.my_rate) == (1e-6, 1e-5, "x", 0.2)
    assert (base.rollout_stop, actor.rollout_stop) == (None, ["END"])
    assert not hasattr(actor, "num_nodes")
    assert actor.kl_coef == 0.1


def test_the_critic(write):
    base, critic = roles_of(write, "megatron:\n- {role: critic, args: {lr: 1e-5}}", "critic")
    assert (critic.lr, critic.kl_coef, critic.untie_embeddings_and_output_weights) == (1e-5, 0, True)
    assert (critic.use_opd, critic.custom_advantage_function_path) == (False, None)
    assert critic.disable_param_buffers_cpu_backup is False
    assert base.kl_coef == 0.1
    text = "megatron:\n- {role: critic, args: {disable_param_buffers_cpu_backup: true, kl_coef: 0.5}}"
    _, critic = roles_of(write, text, "critic")
    assert (critic.disable_param_buffers_cpu_backup, critic.kl_coef) == (True, 0)


def test_the_critic_of_a_plugins_own_namespace(write):
    base = Namespace(lr=1.0, sizes=[1])
    critic = parse_megatron_role_args(base, None, "critic")
    assert vars(critic) == {"lr": 1.0, "sizes": [1], **CRITIC_VALUES, "disable_param_buffers_cpu_backup": False}
    critic = parse_megatron_role_args(base, write("megatron: [{role: critic, overrides: {lr: '2'}}]"), "critic")
    assert (critic.lr, base.lr, critic.sizes is base.sizes) == (2.0, 1.0, False)
    assert vars(base) == {"lr": 1.0, "sizes": [1]}


@pytest.mark.parametrize("text", ["megatron: []", "megatron: [{role: critic}]", "megatron: [{role: actor, args: }]"])
def test_a_role_without_overrides_inherits(write, text):
    base, actor = roles_of(write, text, "actor")
    assert vars(actor) == vars(base)


def test_a_role_that_a_caller_knows(write):
    path = write("megatron: [{role: judge, overrides: {lr: 1}}]")
    assert read_roles(path, ("judge",)) == {"judge": {"lr": 1.0}}


def test_unknown_names_are_set_and_said(write):
    base, actor = roles_of(write, "megatron: [{role: actor, overrides: {use_kl_los: 1}}]", "actor")
    assert actor.use_kl_los == 1
    assert any(
        w.endswith("role actor: use_kl_los: no flag has this name; did you mean use_kl_loss?") for w in base.warnings
    )


MISTAKES = [
    ("megatron: {a: 1}", ["line 1, megatron: expected a list, got a mapping; start every entry with a dash: `- `"]),
    ("megatron:", ["line 1, megatron: expected a list, got nothing"]),
    ("roles: []", ["line 1, megatron: is missing", "line 1, roles: unknown key; known are megatron"]),
    ("megatron: [actor]", ["line 1, megatron[0]: expected a mapping (`name: value` lines), got 'actor'"]),
    (
        "megatron:\n- role: actor\n- role: actor\n",
        ["line 3, megatron[1].role: role actor has an entry above already; merge the two"],
    ),
    ("megatron: [{role: critc}]", ["line 1, megatron[0].role: expected one of actor, critic, got 'critc'"]),
    (
        "megatron:\n- role: critic\n  override: {}\n- overrides: [lr]\n- role: actor\n  args:\n    lr: fast\n"
        "    use_kl_loss: 3\n    advantage_estimator: gpo\n    eval_interval: 0\n  overrides: {}\n",
        [
            "line 3, megatron[0].override: unknown key; did you mean overrides?",
            "line 4, megatron[1].role: is missing",
            "line 4, megatron[1].overrides: expected a mapping (`name: value` lines), got a list",
            "line 7, megatron[2].args.lr: expected a number, got 'fast'",
            "line 8, megatron[2].args.use_kl_loss: expected true or false, got 3",
            "line 9, megatron[2].args.advantage_estimator: expected one of grpo, gspo, cispo, reinforce_plus_plus, "
            "reinforce_plus_plus_baseline, rloo, ppo, got 'gpo'",
            "line 10, megatron[2].args.eval_interval: expected a value greater than or equal to 1, got 0",
            "line 6, megatron[2].args: the same is given under its other name; keep one",
        ],
    ),
]


@pytest.mark.parametrize(("text", "expected"), MISTAKES, ids=[repr(text)[:40] for text, _ in MISTAKES])
def test_all_mistakes_at_once(mistakes, text, expected):
    assert sorted(mistakes(read_roles, "--megatron-config-path", text)) == sorted(expected)
