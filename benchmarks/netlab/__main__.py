"""Run a command on every host of a network of limited bandwidth.

``python -m benchmarks.netlab --hosts 2 --mbit 1000 -- python train.py``
"""

from __future__ import annotations

import argparse
import sys

from benchmarks.netlab.network import Link, Network, ended_like_interrupt
from partc.errors import PartcError


def main() -> int:
    options = _options()
    try:
        with (
            ended_like_interrupt(),
            Network(options.hosts, Link(options.mbit, options.latency)) as network,
        ):
            network.run(options.command, options.timeout)
    except PartcError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(network.traffic, file=sys.stderr)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.netlab", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--mbit", type=float, default=1000, help="Mbit/s, each direction")
    parser.add_argument("--latency", type=float, default=0.5, help="ms, one way")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("command", nargs="+", help="after --")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
