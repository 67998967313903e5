"""One safe reader of the YAML files that flags name: it knows the line of every key, and so do its errors.

It reads PyYAML's nodes, not values: flags are typed from a text as it is written (``1.10`` may be one), messages show
that text, and all keys that are given twice are named at once.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from slime.arguments.errors import ArgumentError

if TYPE_CHECKING:
    import yaml

    class Node(Protocol):
        """A node of PyYAML's; ``id`` is ``scalar``, ``sequence`` or ``mapping``."""

        id: str
        tag: str
        value: Any
        start_mark: yaml.Mark


MAX_CHARS = 16 << 20
MAX_VALUES = 1_000_000
KeyPath = tuple[str | int, ...]

_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)
_INT = re.compile(r"^(?:[-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(?:0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+)$")


class Document:
    """The contents of a file: ``data`` (plain values), the lines they stand on, and what was found so far: mistakes,
    and ``warnings``.

    ``at`` is always the path of keys and list places that leads to a value: ``("datasets", 1, "path")``.
    """

    def __init__(self, option: str, path: str, source: str, root: Node) -> None:
        self.option, self.path = option, path
        self.data: dict[str, Any] = {}
        self._source, self._root = source, root
        self.warnings: list[str] = []
        self._mistakes: list[tuple[int, str]] = []
        self._children: dict[int, dict[str | int, tuple[Any, Any]]] = {}

    def value(self, at: KeyPath) -> Any:
        """The value at ``at``, or None where there is none."""
        found: Any = self.data
        for step in at:
            try:
                found = found[step]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def text(self, at: KeyPath) -> str | None:
        """The value at ``at`` as it is written, without quotes; None for mappings and lists."""
        node = self._nodes(at)[1]
        return node.value if node is not None and node.id == "scalar" else None

    def line(self, at: KeyPath) -> int:
        """The line (from 1) of the key or list item at ``at``; of what encloses it when there is none."""
        return int(self._nodes(at)[0].start_mark.line) + 1

    def mentions(self, words: str) -> bool:
        """Return True if ``words`` appear anywhere in the file."""
        return words in self._source

    def note(self, at: KeyPath, message: str) -> None:
        """Remember a mistake at ``at``."""
        self._mistakes.append((self.line(at), self._located(at, message)))

    def warn(self, at: KeyPath, message: str) -> None:
        """Remember something that is to be said about ``at``."""
        self.warnings.append(self._located(at, message))

    def check(self) -> None:
        """Raise one ``ArgumentError`` for all mistakes, in the order of their lines."""
        if self._mistakes:
            raise ArgumentError("\n".join(message for _, message in sorted(self._mistakes, key=lambda m: m[0])))

    def _located(self, at: KeyPath, message: str) -> str:
        place = f", {written(at)}" if at else ""
        return f"{self.option} {self.path}, line {self.line(at)}{place}: {message}"

    def _nodes(self, at: KeyPath) -> tuple[Any, Any]:
        """The node that says where ``at`` is, and the one with its value (None when ``at`` does not exist)."""
        place = value = self._root
        for step in at:
            if id(value) not in self._children:
                self._children[id(value)] = _children(value)
            below = self._children[id(value)]
            found = below.get(step) or below.get(str(step))
            if found is None:
                return place, None
            place, value = found
        return place, value


def written(at: KeyPath) -> str:
    """``datasets[1].path`` for ``("datasets", 1, "path")``."""
    return "".join(f"[{step}]" if type(step) is int else f".{step}" for step in at).lstrip(".")


def seen(value: object, text: str | None = None) -> str:
    """Return a value as messages show it: ``'fast'``, ``a list``, ``nothing``."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list):
        kind = "mapping" if isinstance(value, dict) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    shown = repr(value) if isinstance(value, str) else text or str(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def read(path: str, option: str) -> Document:
    """Read the file ``path`` that ``option`` names. Raises ``ArgumentError`` for anything but a mapping of names.

    Files are UTF-8. Numbers are read as YAML 1.2 reads them (``1e-5`` is one), dates stay text.
    """
    import yaml

    text = _text(path, option)
    loader = _loader_class()(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise ArgumentError(f"{option} {path}: the file is empty; expected `name: value` lines")
        document = Document(option, path, text, root)
        _refuse_duplicates(document)
        _refuse_explosions(root)
        if root.id != "mapping":
            raise ArgumentError(f"{option} {path}, line {document.line(())}: {_not_a_mapping(root)}")
        document.data = loader.construct_document(root)
    except ArgumentError:
        raise
    except yaml.MarkedYAMLError as error:
        raise ArgumentError(_syntax_message(error, text, f"{option} {path}")) from error
    except (yaml.YAMLError, ValueError) as error:
        raise ArgumentError(f"{option} {path}: this is no YAML: {error}") from error
    except RecursionError as error:
        raise ArgumentError(f"{option} {path}: nested too deeply") from error
    finally:
        loader.dispose()
    return document


def _not_a_mapping(root: Node) -> str:
    if root.id == "sequence":
        return "expected `name: value` lines, got a list"
    hint = "; a colon needs a space behind it" if re.match(r"\w+:\S", root.value) else ""
    return f"expected `name: value` lines, got the text {root.value[:40]!r}{hint}"


def dump(data: object) -> str:
    """YAML that ``read`` turns into the same values."""
    import yaml

    return yaml.dump(
        data, Dumper=_dumper_class(), sort_keys=False, allow_unicode=True, default_flow_style=False, width=2**20
    )


def _text(path: str, option: str) -> str:
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARS + 1)
    except FileNotFoundError as error:
        raise ArgumentError(f"{option} {path}: there is no such file") from error
    except IsADirectoryError as error:
        raise ArgumentError(f"{option} {path}: this is a directory; name the YAML file in it") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{option} {path}: this is no text file (byte {error.start} is not UTF-8)") from error
    except OSError as error:
        raise ArgumentError(f"{option} {path}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_CHARS:
        raise ArgumentError(f"{option} {path}: this is no file of flags: it is longer than {MAX_CHARS >> 20} MiB")
    if "\t" in text:
        with contextlib.suppress(ValueError):  # JSON may be indented with tabs, YAML may not
            json.loads(text)
            return text.replace("\t", " ")
    return text


def _children(node: Node) -> dict[str | int, tuple[Any, Any]]:
    """Key or list place -> the nodes of the key (or the item) and of the value."""
    if node.id == "sequence":
        return {place: (item, item) for place, item in enumerate(node.value)}
    if node.id == "mapping":  # what `<<` merges in stands before the mapping's own keys
        return {_key(key): (key, value) for key, value in node.value if key.id == "scalar"}
    return {}


def _key(node: Node) -> Any:
    """The key that a mapping has for ``node``; numbers, which are looked up by their text, stay text."""
    if node.tag.endswith(":bool"):
        return node.value.lower() in ("yes", "true", "on")
    return None if node.tag.endswith(":null") else node.value


def _refuse_duplicates(document: Document) -> None:
    for at, mapping in _mappings(document._root, (), set(), set()):
        places: dict[str, int] = {}
        for key, _ in mapping.value:
            if key.id != "scalar" or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if key.value in places:
                document.note((*at, key.value), f"the key is given already on line {places[key.value]}; keep one")
            places.setdefault(key.value, line)
    document.check()


def _mappings(node: Node, at: KeyPath, inside: set[int], done: set[int]) -> Iterator[tuple[KeyPath, Any]]:
    """Every mapping below ``node`` once, however often aliases name it. Raises ``ValueError`` for endless ones."""
    if node.id == "scalar" or id(node) in done:
        return
    if id(node) in inside:
        raise ValueError(f"line {node.start_mark.line + 1} contains itself")
    inside.add(id(node))
    if node.id == "mapping":
        yield at, node
        below = [((*at, str(key.value)), value) for key, value in node.value]
    else:
        below = [((*at, place), item) for place, item in enumerate(node.value)]
    for path, value in below:
        yield from _mappings(value, path, inside, done)
    inside.discard(id(node))
    done.add(id(node))


def _refuse_explosions(root: Node) -> None:
    """Raise ``ValueError`` where aliases of aliases make more values than any file of flags has."""
    sizes: dict[int, int] = {}

    def size(node: Node) -> int:
        if node.id == "scalar":
            return 1
        if id(node) not in sizes:
            below = node.value if node.id == "sequence" else [part for pair in node.value for part in pair]
            sizes[id(node)] = 1 + sum(map(size, below))
        return sizes[id(node)]

    if (found := size(root)) > MAX_VALUES:
        raise ValueError(f"its aliases (`*name`) make {found:.1g} values of it, expected at most {MAX_VALUES}")


# A part of the parser's words -> whether the mistake is where the parser's context began, and how we say it.
_SYNTAX: tuple[tuple[str, bool, str], ...] = (
    ("character '\\t'", False, "the line is indented with a tab; YAML wants spaces"),
    (
        "mapping values are not allowed",
        False,
        "the line does not fit the one above: wrong indentation, a colon missing above, or a text with a colon that "
        "has no quotes",
    ),
    ("simple key", True, "expected `name: value`, with a colon and a space"),
    ("flow sequence", True, "the `[` that opens here is not closed, or a comma is missing behind it"),
    ("flow mapping", True, "the `{` that opens here is not closed, or a comma is missing behind it"),
    ("quoted scalar, found unexpected end", True, "the quote that opens here is not closed"),
    ("block", False, "the indentation does not fit the lines above"),
    ("determine a constructor", False, "only plain values may stand here"),
    ("expected a single document", False, "a second document starts here (`---`); a file has one"),
    ("cannot start any token", False, "a text that starts with this character needs quotes"),
)


def _syntax_message(error: yaml.MarkedYAMLError, text: str, where: str) -> str:
    words = ", ".join(part for part in (error.context, error.problem) if part)
    content = _content(error.problem_mark, text)
    if "\t" in content[: len(content) - len(content.lstrip())]:
        words = "character '\\t'"
    found = [(early, said) for part, early, said in _SYNTAX if part in words]
    early, said = found[0] if found else (False, f"this is no YAML: {words}")
    mark = (error.context_mark if early else None) or error.problem_mark or error.context_mark
    if mark is None:
        return f"{where}: {said}"
    return f"{where}, line {mark.line + 1}: {said}: {_content(mark, text).strip()[:60]!r}"


def _content(mark: yaml.Mark | None, text: str) -> str:
    lines = text.splitlines()
    return lines[mark.line] if mark is not None and mark.line < len(lines) else ""


@cache
def _loader_class() -> Any:
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in rules if tag.rsplit(":", 1)[1] not in ("float", "int", "timestamp")]
        for first, rules in loader.yaml_implicit_resolvers.items()
    }
    loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    return loader


@cache
def _dumper_class() -> Any:
    """A writer that quotes what the reader, or a reader of YAML 1.1, would take for something else than text."""
    import yaml

    dumper: Any = type("Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {"ignore_aliases": lambda *_: True})
    dumper.yaml_implicit_resolvers = {first: list(rules) for first, rules in dumper.yaml_implicit_resolvers.items()}
    dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
    return dumper
