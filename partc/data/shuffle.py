"""The shuffled order of a dataset's rows, computed for the rows that are asked for alone."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # even, so that both halves end with the number of bits they began with
_STIR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # of splitmix64


def shuffled(places: NDArray[np.int64], num: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The rows that stand at some places of an epoch's order.

    The order is a permutation of all rows. It needs no memory, and any place can be computed
    alone: a Feistel network permutes the numbers of so many bits as ``num`` needs, and a result
    that is no row goes through the network again, until it is one.

    Args:
        places: i64[n], each from 0 to ``num - 1``.
        num: the number of rows.
        seed: any whole number.
        epoch: each has an order of its own.

    Returns:
        The rows, i64[n].
    """
    bits = max((num - 1).bit_length(), 4)  # three and less give some orders more often
    keys = _keys(seed, epoch)
    rows = _network(places.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(rows >= num)
    while outside.size:  # fewer than half of all numbers, so this ends soon
        rows[outside] = _network(rows[outside], bits, keys)
        outside = outside[rows[outside] >= num]
    return rows.astype(np.int64)


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """A key for each round."""
    digest = hashlib.blake2b(f"order {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _network(
    numbers: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """A permutation of the numbers below ``2 ** bits``, i.e. another result for each number."""
    num_left, num_right = bits // 2, bits - bits // 2
    left = numbers >> np.uint64(num_right)
    right = numbers & np.uint64((1 << num_right) - 1)
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) >> np.uint64(64 - num_left))
        num_left, num_right = num_right, num_left
    return (left << np.uint64(num_right)) | right


def _mixed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """64 bits for each number, of which every one depends on all bits of number and key."""
    mixed = numbers + key  # wraps around, as do the products
    mixed ^= mixed >> np.uint64(30)
    mixed *= _STIR[0]
    mixed ^= mixed >> np.uint64(27)
    mixed *= _STIR[1]
    return mixed
