"""The one exception of this package."""

from __future__ import annotations


class ArgumentError(ValueError):
    """A command line that cannot run: the message names the flags, what was seen and the way out.

    ``parse_args`` prints it and exits with status 2 when it reads ``sys.argv``; callers that pass their own list of
    words, and functions used outside a command line, get the exception.
    """
