"""`python -m support.fuzz --cases 500 --first 0`: a table of what became of them, and a script for each fault."""

import argparse
import sys
import time

from .campaign import campaign


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m support.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="how many")
    parser.add_argument("--first", type=int, default=None, help="number of the first; by default from the clock")
    parser.add_argument("--seed", type=int, default=None, help="this one alone")
    parser.add_argument("--gloo", action="store_true", help="over processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--no-shrink", action="store_true", help="leave failing cases as they are")
    args = parser.parse_args()
    first = args.first if args.first is not None else int(time.time()) % 1_000_000 * 1000
    if args.seed is not None:
        first, args.cases = args.seed, 1
    report = campaign(
        range(first, first + args.cases), gloo=args.gloo, seconds=args.seconds, shrinks=not args.no_shrink
    )
    print(report.table())
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
