"""The line of a traceback that is the user's."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from slime.utils.misc import load_function
from slime.utils.user_code import root_cause, users_frames, users_line

HERE = str(Path(__file__))


def test_the_last_own_line_is_named_and_not_that_of_a_library():
    def mistaken():
        return json.loads("{")  # the line to look at

    with pytest.raises(ValueError) as caught:
        mistaken()
    line = users_line(caught.value)
    assert line.startswith(f"{HERE}:")
    assert line.endswith('return json.loads("{")  # the line to look at')


def test_a_cause_counts_more_than_what_was_made_of_it(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("x = 1\ny = undefined_name\n")
    (tmp_path / "misspelt_module.py").write_text("x = 1\nif x = 1: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module, line in (("broken", "2: y = undefined_name"), ("misspelt", "2: if x = 1: pass")):
        with pytest.raises(ImportError) as caught:
            load_function(f"{module}_module.f")
        assert users_line(caught.value) == f"{tmp_path}/{module}_module.py:{line}"
    assert isinstance(root_cause(caught.value), SyntaxError)


def test_errors_of_slime_alone_have_no_line_of_the_user():
    with pytest.raises(ValueError) as caught:
        load_function("nodots")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next
    assert users_line(caught.value) is None


def test_the_user_s_part_of_a_printed_traceback():
    try:
        json.loads("{")
    except ValueError as e:
        text = "".join(traceback.format_exception(e))
    kept = users_frames(text)
    assert kept[0].startswith(f'  File "{HERE}", line ')
    assert kept[1].strip() == 'json.loads("{")'
    assert "/json/" in text
    assert "/json/" not in "\n".join(kept)
    assert users_frames("ValueError: no traceback") == []
