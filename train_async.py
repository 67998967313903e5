"""Train with generation one step ahead of training. Flags: ``python train_async.py --help``."""

import sys

from slime.arguments import parse_args
from slime.preflight.look.start import look


def train(args):
    from slime import driver  # after the arguments: a mistyped flag is answered at once

    driver.train(args, overlap=True)


if __name__ == "__main__":
    parsed = parse_args(look=look)
    from slime import driver

    sys.exit(driver.run(parsed, overlap=True))
