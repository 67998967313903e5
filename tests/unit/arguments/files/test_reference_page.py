"""The reference page of configuration files: its examples are read, its tables show the models."""

from __future__ import annotations

import re

import pytest

from slime.arguments.command_line import all_flags
from slime.arguments.files import custom_config, environments, eval_config, run_config, sglang_config
from slime.arguments.rules import roles
from tools import gen_config_files_doc

PAGE = gen_config_files_doc.PAGE.read_text(encoding="utf-8")
READERS = {
    "--config": lambda path: run_config.read(path, all_flags()),
    "--custom-config-path": lambda path: custom_config.read(path, all_flags()),
    "--eval-config": eval_config.read,
    "--environment-config": environments.read,
    "--sglang-config": sglang_config.read,
    "--megatron-config-path": roles.read_roles,
}
EXAMPLES = re.findall(r"```yaml\n# (--[\w-]+)\n(.*?)```", PAGE, re.S)


def test_every_file_has_an_example():
    assert {option for option, _ in EXAMPLES} == set(READERS)
    assert len(EXAMPLES) == PAGE.count("```yaml")


@pytest.mark.parametrize(("option", "text"), EXAMPLES)
def test_examples_are_right(write, option, text):
    assert READERS[option](write(text))


def test_the_tables_show_the_models():
    """Run `python -m tools.gen_config_files_doc` when this fails."""
    assert gen_config_files_doc.render() == PAGE
    shown = set(re.findall(r"<!-- keys: (\w+) -->\n\|", PAGE))
    assert shown == set(gen_config_files_doc.MODELS)
