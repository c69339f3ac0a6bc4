"""Compile types of Hugging Face models under two layouts, and print what becomes of each.

``python -m tests.hub [TYPE ...]``, or ``--every N`` for every Nth type that transformers knows. The
exit code is 1 if an error is raw.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter

from tests.hub.types import all_types, compiled, made


def main() -> int:
    """Print a row for each type and layout, then the counts."""
    parser = argparse.ArgumentParser(prog="python -m tests.hub", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="TYPE")
    parser.add_argument("--every", type=int, default=12, metavar="N")
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="NUMBER")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    counts = Counter[str]()
    for name in options.names or all_types()[options.first :: options.every]:
        start = time.monotonic()
        word, text, target = made(name)
        rows = [("made", word, text)] if target is None else compiled(name, target)
        for layout, word, text in rows:
            counts[word] += 1
            told = " ".join(text.split())[:500]
            seconds = time.monotonic() - start
            print(f"{name:<28} {layout:<9} {word:<9} {seconds:5.0f} s  {told}", flush=True)
    print(", ".join(f"{word} {num}" for word, num in sorted(counts.items())))
    return 1 if counts["RAW"] or counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
