"""The values of tool parameters that a model wrote without quotes, typed by the tool's JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 32
"""Schemas may refer to themselves."""
_ALL = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_KIND_OF = {type(None): "null", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def parameter_schemas(schema: object) -> dict[str, tuple[Any, Any]]:
    """Each parameter's schema, with the whole one, where references are looked up; whatever an agent sent as one."""
    found = {}
    for part in _parts(schema, schema, MAX_DEPTH):
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            found.update({name: (one, schema) for name, one in properties.items()})
    return found


def typed(value: str, schema: object = None, root: object = None) -> Any:
    """``value`` as a member of the schema's ``enum`` or ``const``, or as JSON of a type that it allows; as it is
    where it is neither, or the schema says nothing."""
    for member in _members(schema, root, MAX_DEPTH):
        if value == (member if isinstance(member, str) else json.dumps(member)):
            return member
    kinds = _kinds(schema, root, MAX_DEPTH)
    if kinds == _ALL:
        return value
    try:
        found = json.loads(value if value.lower() not in ("true", "false") else value.lower(), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None if value.strip() == "None" and "null" in kinds and "string" not in kinds else value
    kind = _KIND_OF.get(type(found), "string")
    if kind == "number" and found.is_integer() and "integer" in kinds and "number" not in kinds:
        return int(found)
    return found if kind in kinds or (kind == "integer" and "number" in kinds) else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _resolved(schema: Any, root: object) -> Any:
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#"):
        return schema
    found = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return {**found, **{k: v for k, v in schema.items() if k != "$ref"}} if isinstance(found, Mapping) else {}


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _parts(schema: object, root: object, depth: int) -> Iterator[Mapping[str, Any]]:
    """The schema and all that it is made of."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return
    yield schema
    for one in (*_listed(schema, "allOf"), *_listed(schema, "anyOf"), *_listed(schema, "oneOf")):
        yield from _parts(one, root, depth - 1)


def _members(schema: object, root: object, depth: int) -> Iterator[Any]:
    for part in _parts(schema, root, depth):
        yield from _listed(part, "enum")
        if "const" in part:
            yield part["const"]


def _kinds(schema: object, root: object, depth: int) -> frozenset[str]:
    """The types that a value may have: all of them where none are given."""
    schema = _resolved(schema, root)
    if not isinstance(schema, Mapping) or not depth:
        return _ALL
    named = schema.get("type")
    kinds = frozenset(one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str))
    kinds = kinds & _ALL or _ALL
    for key in ("anyOf", "oneOf"):
        if alternatives := _listed(schema, key):
            kinds &= frozenset().union(*(_kinds(one, root, depth - 1) for one in alternatives))
    for one in _listed(schema, "allOf"):
        kinds &= _kinds(one, root, depth - 1)
    members = [*_listed(schema, "enum"), *([schema["const"]] if "const" in schema else [])]
    if members:
        kinds &= frozenset(_KIND_OF.get(type(member), "string") for member in members)
    if kinds == _ALL:
        implied = [kind for key, kind in (("properties", "object"), ("items", "array")) if key in schema]
        kinds = frozenset(implied) or _ALL
    return kinds | {"null"} if schema.get("nullable") is True and kinds != _ALL else kinds
