"""``python -m slime.arguments FLAGS``: check a command line and print the resolved configuration as YAML."""

from __future__ import annotations

from slime.arguments import parse_args, to_yaml

if __name__ == "__main__":
    print(to_yaml(parse_args()))
