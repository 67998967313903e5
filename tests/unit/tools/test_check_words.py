"""The words of code, on made-up sources."""

import textwrap
from pathlib import Path

import pytest

from tools import check_docs, check_words

SOURCE = textwrap.dedent('''\
    """The run goes on."""

    LIMIT = 3
    """A limit that nobody sets."""


    class Engine:
        """
        Restart it.

        It comes back; `nobody` and ``goes on`` are code.
        """

        def stop(self, reason="nobody"):
            # Until it is told.
            logger.warning("engine %s: %s", "told", f"{reason} anew")
            print("nobody")
            diagnostics.warn(args, f"nothing is learnt {reason}")
            raise RuntimeError(f"asleep: {reason}") from None


    async def test_a_run_goes_on():
        nobody = "told"
        assert nobody
    ''')
HITS = [
    (1, "docstring", "'goes on': write continue, resume"),
    (4, "docstring", "'nobody': write no process, not used"),
    (11, "docstring", "'comes back': write is returned, is restarted"),
    (15, "comment", "'told': write a passive of: pass, name, report"),
    (16, "message", "'anew': write again"),
    (16, "message", "'told': write a passive of: pass, name, report"),
    (18, "message", "'learnt': write learned"),
    (19, "message", "'asleep': write offloaded"),
    (22, "test name", "'goes on': write continue, resume"),
]


def test_words_in_docstrings_comments_messages_and_names_of_tests():
    assert sorted(check_words.check_source(SOURCE)) == HITS


@pytest.mark.parametrize("opening", ["What", "Whether", "Which", "Where", "How", "Who", "Whatever", "Whichever"])
def test_docstrings_open_with_a_statement(opening):
    source = f'"""{opening} it is."""\n\n\ndef f():\n    """\n    {opening} it does."""\n\n\nN = 1\n"""{opening}."""\n'
    mistake = f"{opening!r}: write a statement (Return ..., True if ...)"
    assert sorted(check_words.check_source(source)) == [(line, "opening", mistake) for line in (1, 5, 10)]


def test_a_word_that_only_begins_like_a_question_is_a_statement():
    assert [*check_words.check_source('"""When it ends. However. Whole files."""\n')] == []


def test_the_command_prints_each_hit_and_a_count_per_kind(tmp_path: Path, capsys):
    (tmp_path / "clean.py").write_text('"""Return it."""\n')
    assert check_words.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "words: no hit\n"
    (tmp_path / "b.py").write_text("# told\n# Is it told?\n")
    (tmp_path / "a.py").write_text('"""How learnt."""\n')
    assert check_words.main([str(tmp_path)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/a.py:1: 'learnt': write learned",
        f"{tmp_path}/a.py:1: 'How': write a statement (Return ..., True if ...)",
        f"{tmp_path}/b.py:1: 'told': write a passive of: pass, name, report",
        f"{tmp_path}/b.py:2: 'told': write a passive of: pass, name, report",
        "words: comment 2, docstring 1, opening 1",
    ]


def test_the_documentation_check_has_the_paths(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_docs"])
    monkeypatch.setattr(check_docs, "documents", list)
    monkeypatch.setattr(check_docs, "check_pages", lambda *_: [])
    monkeypatch.setattr(check_docs, "check_generated", list)
    monkeypatch.setattr(check_docs.gen_model_scripts, "differences", list)
    file = tmp_path / "a.py"
    file.write_text("# told\n")
    monkeypatch.setattr(check_words, "PATHS", (str(file),))
    assert check_docs.main() == 1
    assert capsys.readouterr().err == f"{file}:1: 'told': write a passive of: pass, name, report\n"
