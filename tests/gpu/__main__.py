"""Run programs on a GPU and compare them with their models; print a row for each that is not right.

``python -m tests.gpu [WORD ...]``: of the cases whose names have one of the words, or all; with
``--device cpu`` the same cases run where there is no GPU. The exit code is 1 if one is
neither right nor refused by name.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed

from tests.gpu.cases import cases, run


def main() -> int:
    """Run the cases in as many processes as there are cores, which share the GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="parts of the names of cases (default: all)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    args = parser.parse_args()
    names = [name for name in cases() if not args.words or any(word in name for word in args.words)]
    counts, start = Counter[str](), time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.workers, mp_context=context) as pool:
        waiting = {pool.submit(run, name, args.device): name for name in names}
        for done in as_completed(waiting):
            word, text = done.result()
            counts[word] += 1
            if word != "right":
                told = " ".join(text.split())[:600]
                print(f"{waiting[done]:<40} {word:<8} {told}", flush=True)
    took = time.perf_counter() - start
    print(", ".join(f"{word} {num}" for word, num in sorted(counts.items())), f"({took:.0f} s)")
    return 1 if counts.keys() - {"right", "refused"} else 0


if __name__ == "__main__":
    sys.exit(main())
