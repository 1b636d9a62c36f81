"""A random order of `n` numbers that needs no memory: a Feistel network with cycle walking.

The same seed, epoch and place give the same number, on any machine and any number of ranks.

Source: M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM J. Comput. 17(2), 1988; J. Black and
P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002 (cycle walking). The round function is the finalizer of SplitMix64 (G. Steele,
D. Lea and C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Final

import torch

SIZE_MAX: Final = 1 << 62
_ROUNDS: Final = 8


def _signed(value: int) -> int:
    """Return the 64 bits as torch has them: it has no arithmetic on unsigned ones."""
    return value - (1 << 64) if value >= 1 << 63 else value


_ADD: Final = _signed(0x9E3779B97F4A7C15)
_FIRST: Final = _signed(0xBF58476D1CE4E5B9)
_SECOND: Final = _signed(0x94D049BB133111EB)


class Permutation:
    """A permutation of 0 to n - 1.

    Args:
        n: how many numbers, 1 to 2^62.
        seed: any integer.
        epoch: another order for each.

    Raises:
        ValueError: `n` is out of range.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if not 1 <= n <= SIZE_MAX:
            raise ValueError(f"n is {n}; it must be 1 to 2^62")
        self.n = n
        # Two halves of equal width: at most four times n places, so cycle walking takes four steps at most on average.
        self._half = max(1, ((n - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half) - 1
        material = hashlib.blake2b(f"{seed}:{epoch}:{n}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = struct.unpack(f"<{_ROUNDS}q", material)

    def __call__(self, places: Any) -> Any:
        """Return the numbers at these places.

        Args:
            places: a sequence or tensor of integers, each 0 to n - 1.

        Returns:
            An int64 tensor on the CPU, of the same length.

        Raises:
            IndexError: a place is out of range.
        """
        numbers = torch.as_tensor(places, dtype=torch.int64).reshape(-1).clone()
        if numbers.numel() and (int(numbers.min()) < 0 or int(numbers.max()) >= self.n):
            raise IndexError(f"places go from 0 to {self.n - 1}")
        outside = torch.arange(numbers.numel())
        while outside.numel():
            found = self._encrypt(numbers[outside])
            numbers[outside] = found
            outside = outside[found >= self.n]
        return numbers

    def _encrypt(self, values: Any) -> Any:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            mixed = (right ^ key) + _ADD
            mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
            mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
            mixed = mixed ^ _shifted(mixed, 31)
            left, right = right, left ^ (mixed & self._mask)
        return (left << self._half) | right


def _shifted(values: Any, bits: int) -> Any:
    """Shift right without the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
