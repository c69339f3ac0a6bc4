"""Random numbers of a sample: they follow from its place in the run, whoever reads it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator


def seed_of(*parts: int | str) -> int:
    """64 bits that follow from numbers and words; other parts give other bits."""
    digest = hashlib.blake2b(" ".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def seed_process(seed: int) -> None:
    """Seed the global generators of torch (on CPU), numpy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


class Generators:
    """Other global generators than the script's own, where its process reads data itself."""

    def __init__(self, seed: int = 0) -> None:
        self._torch, self._python = torch.default_generator.get_state(), random.getstate()
        self._numpy = np.random.MT19937(0)
        with self.used():
            seed_process(seed)  # as a worker is seeded

    @contextmanager
    def used(self) -> Iterator[None]:
        """Draw from these, and leave the script's as they were; the next time goes on from here."""
        script = torch.default_generator.get_state(), random.getstate()
        numpy_script = get_bit_generator()
        self._set(self._torch, self._numpy, self._python)
        try:
            yield
        finally:
            self._torch, self._python = torch.default_generator.get_state(), random.getstate()
            self._set(script[0], numpy_script, script[1])

    @staticmethod
    def _set(torch_state: torch.Tensor, numpy_generator: Any, python_state: Any) -> None:
        torch.default_generator.set_state(torch_state)
        set_bit_generator(numpy_generator)  # a hundred times faster than its state
        random.setstate(python_state)
