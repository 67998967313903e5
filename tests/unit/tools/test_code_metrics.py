"""The report about the code, over a made-up package in which every number can be counted by hand."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tools.code_metrics import Code, report

FILES = {
    "__init__.py": "",
    "top.py": """
        from made.middle import generate, send

        async def group(args):
            return await outer(args, send)

        async def outer(args, then):
            return await generate(args, then)
        """,
    "middle.py": """
        from . import bottom
        from made.wire import post as send_it

        async def generate(args, then):
            limit = getattr(args, "limit", 0) + getattr(self.critic_args, "users_own", 0)
            return await then(_short(limit))

        async def send(payload, *args):
            return await Client(payload)

        class Client:
            async def __call__(self, payload):
                return await self._once(payload)

            async def _once(self, payload):
                return await send_it(payload)

            def _kind(self):
                return "client"

            def name(self):
                return self._kind()

        class Other(Client):
            def _kind(self):
                return "other"

        def _short(value):
            return _twice(value) + _twice(bottom.ONE)

        def _twice(value):
            return 2 * value
        """,
    "bottom.py": """
        ONE = 1

        def look():
            import made.top
        """,
    "wire.py": """
        if TYPE_CHECKING:
            from made.top import group

        async def post(payload):
            return getattr(payload, "limit")
        """,
}
SETTINGS = {
    "importlinter": {
        "contracts": [
            {"type": "layers", "containers": ["made"], "layers": ["top", "middle | wire", "bottom"]},
            {"type": "forbidden"},
        ]
    },
    "mypy": {"packages": ["made.middle", "made.wire"], "overrides": [{"module": "made.wire", "ignore_errors": True}]},
}


@pytest.fixture
def code(tmp_path: Path) -> Code:
    (tmp_path / "made").mkdir()
    for name, text in FILES.items():
        (tmp_path / "made" / name).write_text(textwrap.dedent(text))
    return Code(tmp_path, "made")


def test_imports_and_circles(code: Code) -> None:
    assert code.imports == {
        "made": set(),
        "made.top": {"made.middle"},
        "made.middle": {"made.bottom", "made.wire"},
        "made.bottom": {"made.top"},
        "made.wire": set(),
    }
    assert code.circles() == [["made.bottom", "made.middle", "made.top"]]
    assert code.with_one_importer() == ["made.bottom", "made.middle", "made.top", "made.wire"]


def test_upward_and_sideways_imports_unless_ignored(code: Code) -> None:
    contract = dict(SETTINGS["importlinter"]["contracts"][0])
    assert code.upward_imports([contract]) == ["made.bottom -> made.top", "made.middle -> made.wire"]
    contract["ignore_imports"] = ["made.middle -> made.w*", "made.bottom -> made.top.**"]
    assert code.upward_imports([contract]) == []


def test_a_function_that_is_passed_on_is_called_where_it_arrives(code: Code) -> None:
    chain = code.shortest_chain("made.top.group", "post")
    assert [name.removeprefix("made.") for name in chain] == [
        "top.group", "top.outer", "middle.send", "middle.Client.__call__", "middle.Client._once", "wire.post",
    ]  # fmt: skip
    assert code.shortest_chain("made.top.gone", "post") == code.shortest_chain("made.wire.post", "group") == []


def test_functions_and_guards(code: Code) -> None:
    """``_kind`` is called once, too, but means two methods."""
    assert code.short_private_functions() == ["made.middle._short", "made.middle._once"]
    assert code.getattr_on_args() == ["limit", "users_own"]
    assert code.functions_that_take_args() == 3


def test_the_report_counts_lines_and_declared_flags(code: Code) -> None:
    measures = dict(report(code, SETTINGS, {"limit"}))
    lines = {name: text.count("\n") for name, text in FILES.items()}
    assert measures["lines"] == str(sum(lines.values()))
    assert measures["files"] == "5"
    assert measures["largest file"] == f"{lines['middle.py']} lines, made.middle"
    assert measures["getattr on args"] == "2, of them 1 on declared flags"
    assert measures["lines that mypy checks"].startswith(f"{lines['middle.py']} (")
    assert measures["upward imports"].splitlines()[0] == "2"


def test_reads_of_args_whose_type_is_known(tmp_path: Path) -> None:
    """Known: ``a`` to ``f``; of another type: ``u`` to ``x``. The others have no annotation that could say it."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "__init__.py").write_text("")
    (tmp_path / "made" / "base.py").write_text(
        textwrap.dedent("""
            class Base:
                def __init__(self, args: Args) -> None:
                    self.args = args
                    self.rate = self.args.a

            class Plain:
                def __init__(self, args):
                    self.rate = args.u
            """)
    )
    (tmp_path / "made" / "reads.py").write_text(
        textwrap.dedent("""
            from made.base import Base as Above, Plain

            class Below(Above):
                def read(self, args: argparse.Namespace):
                    return self.args.b, args.v

            class Declared(other.Declared):
                args: types.Args

                def read(self):
                    self.args.c = 1

            class Unknown(Plain):
                def read(self):
                    return self.args.w

            def outer(args: Args | None, *, key=lambda args: args.lambdas):
                def inner():
                    return args.d + (lambda x: args.e)(args.f.deeper)

                def hides(args: Any):
                    return args.x

            def main():
                args = parse_args()
                return args.local
            """)
    )
    assert Code(tmp_path, "made").typed_reads_of_args() == (6, 10)


def test_lists_of_flags_any_and_long_functions(tmp_path: Path) -> None:
    (tmp_path / "made" / "arguments" / "groups").mkdir(parents=True)
    listed = """
        NAMES = ("--save-hf", "save", "load")
        ROLES = {"save": 1, "load": 2, "seed": 3}
        OPTIONS = {1: "--save", 2: "--load", 3: "--seed"}
        OTHERS = {"save": 1, "load": 2}, ["save", "load", "lr", "x"], {"fp16", "bf16", "fp8"}
        MOSTLY_NOT = ("save", "load", "seed", "a", "b", "c", "d")

        def read(args: Any, name: str, *rest: typing.Any) -> None:
            a, b, c = args.save, args.load, args.seed
            return [args.save, args.load, args.seed], [self.save, self.load, self.seed]
        """
    (tmp_path / "made" / "__init__.py").write_text(textwrap.dedent(listed))
    (tmp_path / "made" / "arguments" / "groups" / "train.py").write_text(textwrap.dedent(listed))
    (tmp_path / "made" / "long.py").write_text(
        "def fits():\n" + "    x = 1\n" * 66 + "def exceeds(self):\n" + "    x = 1\n" * 67
    )
    code = Code(tmp_path, "made")
    declared = {"save", "load", "seed", "save_hf", "fp16", "bf16", "fp8"}
    assert code.flag_lists(declared - {"fp16", "bf16", "fp8"}) == [
        "made:2 (3)",
        "made:3 (3)",
        "made:4 (3)",
        "made:10 (3)",
    ]
    assert code.any_parameters() == (4, 6)
    assert code.long_functions() == ["made.long.exceeds"]
    measures = dict(report(code, SETTINGS, declared, {"fp16", "bf16", "fp8"}))
    assert measures["lists of flags outside declarations"].splitlines()[0] == "4"
    assert measures["`Any` parameters"] == "4 of 6 (66.7%)"
    assert measures["functions > 67 lines"].splitlines()[0] == "1"
