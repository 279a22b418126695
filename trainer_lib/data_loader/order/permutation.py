"""A shuffle without a list: the sample at each position of a pass is computed.

A Feistel network is a bijection whatever its round functions are. On a grid of two nearly equal sides it covers hardly
more numbers than there are samples. A position that lands outside goes through the network again until it lands
inside, which keeps the bijection. So any position can be looked up at once, in constant memory.
"""

import math
from hashlib import shake_128

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]

_ODD, _OTHER_ODD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_FEW = 4096  # below this number of samples, more rounds are needed for equally likely permutations


class Shuffle:
    """A bijection of the positions 0 to `size` - 1 onto the samples 0 to `size` - 1.

    Args:
        size: The number of samples.
        key: The text that determines the bijection.

    Example:
        >>> sorted(Shuffle(5, "seed 7, pass 0")(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: str) -> None:
        rows = math.isqrt(size - 1) + 1 if size > 1 else 1
        columns = -(-size // rows)
        self._size, self._grid = size, rows * columns
        self._rows, self._columns = np.uint64(rows), np.uint64(columns)
        self._keys = _keys(key, 16 if size < _FEW else 8)

    def __call__(self, positions: Positions) -> Positions:
        """Return the samples at `positions`."""
        samples = self._permuted(positions.astype(np.uint64))
        if self._grid > self._size:
            outside = samples >= self._size
            while outside.any():
                samples[outside] = self._permuted(samples[outside])
                outside = samples >= self._size
        return samples.astype(np.int64)

    def _permuted(self, numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        row = numbers // self._columns
        column = numbers - row * self._columns
        for index, key in enumerate(self._keys):
            if index % 2 == 0:
                row = _shifted(row, column, key, self._rows)
            else:
                column = _shifted(column, row, key, self._columns)
        return row * self._columns + column


class Draws:
    """Samples drawn with replacement: the draw of each position is independent of the others.

    Args:
        size: The number of samples to draw from.
        key: The text that determines the draws.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = np.uint64(size)
        self._keys = _keys(key, 2)

    def __call__(self, positions: Positions) -> Positions:
        """Return the samples drawn for `positions`."""
        numbers = positions.astype(np.uint64)
        for key in self._keys:
            numbers = _mixed(numbers + key)
        # The upper half scaled to the size: practically uniform for any size of a dataset.
        return (((numbers >> np.uint64(32)) * self._size) >> np.uint64(32)).astype(np.int64)


def _shifted(
    half: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], key: np.uint64, side: np.uint64
) -> npt.NDArray[np.uint64]:
    """Return `half` shifted by a function of the other half, modulo the side of the grid."""
    step = ((_mixed(other + key) >> np.uint64(32)) * side) >> np.uint64(32)
    moved = half + step
    # A number below 0 wraps to a huge unsigned one, so the smaller of the two is the one inside.
    return np.minimum(moved, moved - side)


def _mixed(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mixed = numbers * _ODD
    mixed ^= mixed >> np.uint64(29)
    mixed *= _OTHER_ODD
    mixed ^= mixed >> np.uint64(32)
    return mixed


def _keys(key: str, count: int) -> npt.NDArray[np.uint64]:
    # A fixed byte order, so that the order of samples does not depend on the machine.
    return np.frombuffer(shake_128(key.encode()).digest(8 * count), dtype="<u8").astype(np.uint64)
