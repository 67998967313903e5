"""Train: generate -> train -> sync weights, one after the other. Flags: ``python train.py --help``."""

import sys

from slime.arguments import parse_args
from slime.preflight.look.start import look


def train(args):
    from slime import driver  # after the arguments: a mistyped flag is answered at once

    driver.train(args)


if __name__ == "__main__":
    parsed = parse_args(look=look)
    from slime import driver

    sys.exit(driver.run(parsed))
