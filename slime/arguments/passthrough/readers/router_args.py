"""The arguments of the installed router."""

from __future__ import annotations

import argparse


def read() -> argparse.ArgumentParser:
    """The parser of ``RouterArgs.add_cli_args``: prefixed, without host and port."""
    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    return parser
