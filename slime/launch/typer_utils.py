"""Command lines of launch scripts that are described by a dataclass. Needs the package ``typer``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

ENV_VAR_PREFIX = "SLIME_SCRIPT_"


def dataclass_cli(
    func: Callable[..., Any] | None = None, *, env_var_prefix: str = ENV_VAR_PREFIX
) -> Callable[..., Any]:
    """Decorate ``func(args: SomeDataclass)`` for ``typer.run``: a flag per field, ``--num-nodes`` for ``num_nodes``.

    Its environment variable is ``env_var_prefix`` and the field's name in capitals. Raises TypeError for a function
    that does not take one dataclass, and ImportError without typer.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        import typer

        parameters = list(inspect.signature(function).parameters)
        kind = get_type_hints(function).get(parameters[0]) if len(parameters) == 1 else None
        if not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
            raise TypeError(
                f"{function.__qualname__} must take one argument annotated with a dataclass, got {parameters}"
            )
        types = get_type_hints(kind, include_extras=True)
        flags = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(field),
                annotation=Annotated[types[field.name], typer.Option(envvar=f"{env_var_prefix}{field.name.upper()}")],
            )
            for field in dataclasses.fields(kind)
            if field.init
        ]

        @wraps(function)
        def command(**values: Any) -> Any:
            return function(kind(**values))

        del command.__wrapped__  # typer would read the signature there
        command.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
        command.__annotations__ = {flag.name: flag.annotation for flag in flags}
        return command

    return decorate if func is None else decorate(func)


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return inspect.Parameter.empty if field.default_factory is dataclasses.MISSING else field.default_factory()
