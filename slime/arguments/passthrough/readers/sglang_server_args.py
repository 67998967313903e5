"""The arguments of the installed SGLang server."""

from __future__ import annotations

import argparse


def read() -> argparse.ArgumentParser:
    """The parser of ``ServerArgs.add_cli_args``."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser
