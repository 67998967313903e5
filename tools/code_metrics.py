"""Print the size and the coupling of the code: ``python -m tools.code_metrics``. A report, not a gate.

Everything is read from the source text; nothing is imported but the table of flags.
"""

from __future__ import annotations

import argparse
import ast
import fnmatch
import statistics
import tomllib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHORT_FUNCTION = 8
LONG_FUNCTION = 67
FLAGS_OF_A_LIST = 3
DECLARATIONS = "arguments.groups"
"""Below the package: where flags are declared."""
GROUP = "slime.rollout.sglang_rollout.generate_and_rm_group"
POST = "post"

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    """One file of the package."""

    name: str
    path: Path
    is_package: bool
    tree: ast.Module
    lines: int

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def for_types_alone(self) -> set[ast.AST]:
        """The nodes below ``if TYPE_CHECKING:``."""
        blocks = (node for node in self.nodes if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING")
        return {below for block in blocks for statement in block.body for below in ast.walk(statement)}

    @cached_property
    def imported(self) -> dict[str, str]:
        """Local name -> dotted name that an import binds it to, wherever the import is."""
        return dict(_bindings(self))


class Code:
    """The modules of one package and what they refer to."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.package = root, package
        self.modules: dict[str, Module] = {}
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            text = path.read_text(encoding="utf-8")
            self.modules[name] = Module(name, path, is_package, ast.parse(text), text.count("\n"))

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of the package that it imports, anywhere in its text; for types alone is no import."""
        return {
            name: {target for dotted in _imported_names(module) if (target := self._module_of(dotted))} - {name}
            for name, module in self.modules.items()
        }

    def _module_of(self, dotted: str) -> str | None:
        """The module that ``dotted`` names, or whose attribute it names."""
        if dotted in self.modules:
            return dotted
        parent = dotted.rpartition(".")[0]
        return parent if parent in self.modules else None

    @cached_property
    def functions(self) -> dict[str, tuple[Module, str | None, Function]]:
        """``module.function`` and ``module.Class.method`` -> (module, class, function)."""
        found: dict[str, tuple[Module, str | None, Function]] = {}
        for module in self.modules.values():
            for node in module.tree.body:
                if isinstance(node, Function):
                    found[f"{module.name}.{node.name}"] = (module, None, node)
                elif isinstance(node, ast.ClassDef):
                    for method in node.body:
                        if isinstance(method, Function):
                            found[f"{module.name}.{node.name}.{method.name}"] = (module, node.name, method)
        return found

    def resolve(self, module: Module, owner: str | None, node: ast.expr) -> list[str]:
        """The functions of the package that the expression may mean."""
        if isinstance(node, ast.BoolOp):
            return [name for value in node.values for name in self.resolve(module, owner, value)]
        dotted = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        head, _, rest = dotted.partition(".")
        if head in ("self", "cls") and owner is not None:
            dotted = f"{module.name}.{owner}.{rest}"
        elif head in module.imported:
            dotted = ".".join(filter(None, (module.imported[head], rest)))
        else:
            dotted = f"{module.name}.{dotted}"
        return [name for name in (dotted, f"{dotted}.__init__", f"{dotted}.__call__") if name in self.functions]

    def calls(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield (caller, callee) of one function; a function that is passed on is called by the one it is passed to."""
        module, owner, function = self.functions[name]
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            callees = self.resolve(module, owner, call.func)
            for callee in callees:
                yield name, callee
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                for passed in self.resolve(module, owner, argument):
                    for caller in callees or [name]:
                        yield caller, passed

    def shortest_chain(self, start: str, last: str) -> list[str]:
        """The shortest chain of calls from ``start`` to a function named ``last``, both included; [] without one."""
        edges: dict[str, set[str]] = defaultdict(set)
        chains = deque([[start]] if start in self.functions else [])
        seen = {start}
        while chains:
            chain = chains.popleft()
            if chain[-1].rpartition(".")[2] == last:
                return chain
            for caller, callee in self.calls(chain[-1]):
                edges[caller].add(callee)
            fresh = sorted(edges[chain[-1]] - seen)
            seen.update(fresh)
            chains.extend([*chain, name] for name in fresh)
        return []

    def circles(self) -> list[list[str]]:
        """The sets of modules that import each other, directly or through others."""
        reached = {name: self._reached(name) for name in self.modules}
        groups = {
            frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in self.modules
        }
        return sorted(sorted(group) for group in groups if len(group) > 1)

    def _reached(self, name: str) -> set[str]:
        seen: set[str] = set()
        todo = [name]
        while todo:
            fresh = self.imports[todo.pop()] - seen
            seen |= fresh
            todo.extend(fresh)
        return seen

    def with_one_importer(self) -> list[str]:
        """The modules, packages left out, that exactly one other module imports."""
        importers = Counter(target for targets in self.imports.values() for target in targets)
        return sorted(n for n, module in self.modules.items() if importers[n] == 1 and not module.is_package)

    def short_private_functions(self) -> list[str]:
        """Private functions of at most ``SHORT_FUNCTION`` lines that are called once and named nowhere else.

        Those with a decorator, and methods that several classes define, could not be inlined and are left out.
        """
        found = []
        methods = Counter(name.rpartition(".")[2] for name, (_, owner, _) in self.functions.items() if owner)
        attributes = Counter(n.attr for m in self.modules.values() for n in m.nodes if isinstance(n, ast.Attribute))
        for module in self.modules.values():
            named = Counter(filter(None, map(_last_name, module.nodes)))
            called = Counter(_last_name(node.func) for node in module.nodes if isinstance(node, ast.Call))
            for node in module.nodes:
                if isinstance(node, Function) and node.name.startswith("_") and not node.name.endswith("__"):
                    assert node.end_lineno is not None
                    short = node.end_lineno - node.lineno < SHORT_FUNCTION and not node.decorator_list
                    of_one = not methods[node.name] or methods[node.name] == attributes[node.name] == 1
                    if short and named[node.name] == called[node.name] == 1 and of_one:
                        found.append(f"{module.name}.{node.name}")
        return found

    def getattr_on_args(self) -> list[str | None]:
        """The attribute of every ``getattr(args, ...)`` (None: not a literal)."""
        return [
            node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            for module in self.modules.values()
            for node in module.nodes
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "getattr"
            and len(node.args) > 1
            and ast.unparse(node.args[0]).rpartition(".")[2].endswith("args")
        ]

    def functions_that_take_args(self) -> int:
        """Return the number of functions that have a parameter named ``args``, ``*args`` not counted."""
        nodes = (node for module in self.modules.values() for node in module.nodes)
        return sum(any(a.arg == "args" for a in _parameters(n)) for n in nodes if isinstance(n, Function))

    def typed_reads_of_args(self) -> tuple[int, int]:
        """Return how many reads ``args.x`` and ``self.args.x`` have ``Args`` as the type, and how many there are.

        The type is that of the function's parameter, or of the class's. Local variables ``args`` and parameters of
        lambdas, which have no annotation, are left out.
        """
        typed = [is_typed for module in self.modules.values() for is_typed in self._reads_of_args(module, module.tree)]
        return sum(typed), len(typed)

    def _reads_of_args(self, module: Module, node: ast.AST, known: Mapping[str, bool] | None = None) -> Iterator[bool]:
        """Yield whether the type is ``Args`` for each read below ``node``; ``known``: of ``args`` and ``self.args``."""
        known = known or {}
        for child in ast.iter_child_nodes(node):
            inside = known
            if isinstance(child, ast.Attribute) and (of := ast.unparse(child.value)) in known:
                yield known[of]
            elif isinstance(child, ast.ClassDef):
                inside = {"self.args": self._class_has_args(module, child)}
            elif isinstance(child, Function):
                inside = {**known, **{a.arg: _is_args(a.annotation) for a in _parameters(child) if a.arg == "args"}}
            elif isinstance(child, ast.Lambda) and any(a.arg == "args" for a in child.args.args):
                inside = {name: is_typed for name, is_typed in known.items() if name != "args"}
            yield from self._reads_of_args(module, child, inside)

    def _class_has_args(self, module: Module, node: ast.ClassDef) -> bool:
        """True if the class, or one of its bases, declares ``args: Args``, itself or as a parameter of ``__init__``."""
        for inner in node.body:
            if isinstance(inner, ast.AnnAssign) and ast.unparse(inner.target) == "args":
                return _is_args(inner.annotation)
            if isinstance(inner, Function) and inner.name == "__init__":
                for parameter in _parameters(inner):
                    if parameter.arg == "args":
                        return _is_args(parameter.annotation)
        names = filter(None, map(_last_name, node.bases))
        bases = (self.classes.get(module.imported.get(name, f"{module.name}.{name}")) for name in names)
        return any(base is not None and base[1] is not node and self._class_has_args(*base) for base in bases)

    @cached_property
    def classes(self) -> dict[str, tuple[Module, ast.ClassDef]]:
        """``module.Class`` -> (module, class)."""
        nodes = ((module, node) for module in self.modules.values() for node in module.nodes)
        return {
            f"{module.name}.{node.name}": (module, node) for module, node in nodes if isinstance(node, ast.ClassDef)
        }

    def any_parameters(self) -> tuple[int, int]:
        """Return how many parameters are plain ``Any``, and how many there are, ``self`` and ``cls`` left out."""
        annotations = [
            a.annotation
            for module in self.modules.values()
            for n in module.nodes
            if isinstance(n, Function)
            for a in (*_parameters(n), n.args.vararg, n.args.kwarg)
            if a is not None and a.arg not in ("self", "cls")
        ]
        return sum(a is not None and _last_name(a) == "Any" for a in annotations), len(annotations)

    def long_functions(self) -> list[str]:
        """The functions of more than ``LONG_FUNCTION`` lines."""
        return [
            f"{module.name}.{node.name}"
            for module in self.modules.values()
            for node in module.nodes
            if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= LONG_FUNCTION
        ]

    def flag_lists(self, declared: Collection[str]) -> list[str]:
        """The places outside of declarations with a list, tuple, set or dict of ``FLAGS_OF_A_LIST`` flags and more.

        A flag is a string, ``--option`` or attribute, or an ``args.attribute``; of a dict keys count, or values that
        are strings. Where most elements are no flags, and on the right side of ``a, b, c = ...``, it is no list.
        """
        found = []
        for module in self.modules.values():
            if module.name.startswith(f"{self.package}.{DECLARATIONS}"):
                continue
            unpacked = {
                n.value for n in module.nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple)
            }
            for node in module.nodes:
                if node in unpacked:
                    continue
                columns: list[Sequence[ast.AST | None]] = []
                if isinstance(node, ast.Dict):
                    columns = [node.keys, [value for value in node.values if isinstance(value, ast.Constant)]]
                elif isinstance(node, ast.List | ast.Tuple | ast.Set):
                    columns = [node.elts]
                for column in columns:
                    count = sum(_flag_name(item) in declared for item in column)
                    if count >= FLAGS_OF_A_LIST and 2 * count >= len(column):
                        found.append(f"{module.name}:{node.lineno} ({count})")
                        break
        return found

    def upward_imports(self, contracts: list[Mapping[str, Any]]) -> list[str]:
        """Imports against the layers of import-linter's ``contracts``: upwards, or between siblings."""
        found = []
        for contract in contracts:
            if contract["type"] != "layers":
                continue
            ignored = [pattern.split(" -> ") for pattern in contract.get("ignore_imports", ())]
            for container in contract.get("containers", [""]):
                rows = [[name.strip(" ()") for name in row.replace(":", "|").split("|")] for row in contract["layers"]]
                row_of = {f"{container}.{name}".strip("."): row for row, names in enumerate(rows) for name in names}
                for source, targets in self.imports.items():
                    for target in sorted(targets):
                        above, below = _room(source, row_of), _room(target, row_of)
                        if above is None or below is None or above == below or row_of[above] < row_of[below]:
                            continue
                        if not any(_like(source, one) and _like(target, other) for one, other in ignored):
                            found.append(f"{source} -> {target}")
        return sorted(set(found))

    def typed_lines(self, mypy: Mapping[str, Any]) -> int:
        """The lines of the modules that mypy checks under its settings."""
        ignored = [
            pattern
            for override in mypy.get("overrides", ())
            if override.get("ignore_errors")
            for pattern in ([override["module"]] if isinstance(override["module"], str) else override["module"])
        ]
        return sum(
            module.lines
            for name, module in self.modules.items()
            if any(name == package or name.startswith(f"{package}.") for package in mypy["packages"])
            and not any(fnmatch.fnmatch(name, pattern) for pattern in ignored)
        )


def _last_name(node: ast.AST) -> str | None:
    """``name`` of the expressions ``name`` and ``x.name``."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _is_args(annotation: ast.expr | None) -> bool:
    return annotation is not None and any(_last_name(node) == "Args" for node in ast.walk(annotation))


def _parameters(function: Function) -> list[ast.arg]:
    """The parameters, without ``*args`` and ``**kwargs``."""
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def _flag_name(node: ast.AST | None) -> str | None:
    """The attribute that a string, spelled as a flag or as an attribute, or ``args.attribute`` names."""
    if isinstance(node, ast.Constant):
        return node.value.removeprefix("--").replace("-", "_") if isinstance(node.value, str) else None
    of_args = isinstance(node, ast.Attribute) and (_last_name(node.value) or "").endswith("args")
    return node.attr if of_args and isinstance(node, ast.Attribute) else None


def _imported_names(module: Module) -> Iterator[str]:
    """Yield the dotted name of everything that is imported anywhere in the file, except for types alone."""
    for node in module.nodes:
        if node in module.for_types_alone:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{_origin(module, node)}.{alias.name}" for alias in node.names)


def _bindings(module: Module) -> Iterator[tuple[str, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.split(".")[0],) * 2
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{_origin(module, node)}.{alias.name}"


def _origin(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name of the module after ``from``, relative ones resolved."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    parts = parts[: len(parts) - node.level + module.is_package]
    return ".".join([*parts, *filter(None, [node.module])])


def _room(name: str, rooms: Mapping[str, int]) -> str | None:
    """The layer that the module belongs to."""
    parts = name.split(".")
    return next((r for n in range(len(parts), 0, -1) if (r := ".".join(parts[:n])) in rooms), None)


def _like(name: str, pattern: str) -> bool:
    """Return True if a module matches an expression of import-linter (``**`` matches the module's children, too)."""
    return fnmatch.fnmatch(name, pattern.replace("**", "*")) or name == pattern.removesuffix(".**")


def declared_flags() -> set[str]:
    """The attribute of every flag that the command line knows."""
    from slime.arguments.command_line import all_flags

    return {flag.dest for flag in all_flags()}


def values_of_flags() -> set[str]:
    """The words that flags take as values; ``fp16`` is one, and a flag too."""
    from slime.arguments.command_line import all_flags

    return {choice for flag in all_flags() for choice in flag.choices or () if isinstance(choice, str)}


def report(
    code: Code, settings: Mapping[str, Any], declared: set[str], words: Collection[str] = ()
) -> list[tuple[str, str]]:
    """Return (what, how much) of every measure. ``words`` are no names of flags even where a flag is called so."""
    lines = {name: module.lines for name, module in code.modules.items()}
    total = sum(lines.values())
    largest = max(lines, key=lines.__getitem__)
    guards = code.getattr_on_args()
    guarded = [name for name in guards if name in declared]
    chain = code.shortest_chain(GROUP, POST)
    shown = [name.rpartition(".")[2] for name in chain]
    circles = code.circles()
    upward = code.upward_imports(settings["importlinter"]["contracts"])
    typed = code.typed_lines(settings["mypy"])
    lists, long = code.flag_lists(declared.difference(words)), code.long_functions()
    plain_any, parameters = code.any_parameters()
    known, reads = code.typed_reads_of_args()
    return [
        ("lines", f"{total:,}"),
        ("files", f"{len(lines)}"),
        ("median file", f"{statistics.median(lines.values()):.0f} lines"),
        ("largest file", f"{lines[largest]} lines, {largest}"),
        ("modules with one importer", f"{len(code.with_one_importer())}"),
        (f"private functions called once, <= {SHORT_FUNCTION} lines", f"{len(code.short_private_functions())}"),
        ("getattr on args", f"{len(guards)}, of them {len(guarded)} on declared flags"),
        ("functions that take args", f"{code.functions_that_take_args()}"),
        ("lists of flags outside declarations", f"{len(lists)}{_few(lists, 8)}"),
        ("`Any` parameters", f"{plain_any} of {parameters} ({plain_any / max(1, parameters):.1%})"),
        ("reads of args that mypy checks", f"{known:,} of {reads:,} ({known / max(1, reads):.1%})"),
        (f"functions > {LONG_FUNCTION} lines", f"{len(long)}{_few(long)}"),
        ("frames from group to post", f"{len(chain)}: {' > '.join(shown)}" if chain else "no chain of calls found"),
        ("import circles", f"{len(circles)}{_few([' <> '.join(circle) for circle in circles])}"),
        ("upward imports", f"{len(upward)}{_few(upward)}"),
        ("lines that mypy checks", f"{typed:,} ({typed / total:.0%})"),
    ]


def _few(items: list[str], most: int = 3) -> str:
    return "".join(f"\n  {item[:150]}" for item in items[:most]) + ("\n  ..." if len(items) > most else "")


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="a checkout; the flags are always those of this one")
    root = parser.parse_args().root
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    for what, how_much in report(Code(root, "slime"), settings, declared_flags(), values_of_flags()):
        print(f"{what + ':':45}{how_much}")


if __name__ == "__main__":
    main()
