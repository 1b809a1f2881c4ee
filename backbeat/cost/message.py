"""What one rank sends of a bucket whose largest elements travel (top-k): how many, and the bytes of their message.

    up to 65,536 elements    | values | 16-bit indices |
    more                     | 32-bit indices | values |
    more, where it is less   | ends, one a block of 65,536 | values, by index | 16-bit indices within the block |

Values are fp32, and a message is a whole number of 32-bit words.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCK = 2**16
"""Elements whose indices fit 16 bits."""
_WIDEST = 64
ASSUMED_COMPRESSION_S_PER_BYTE = 5e-10
"""Of a device that nobody knows: about what a core of a CPU takes."""
COMPRESSION_S_PER_BYTE, COMPRESSION_S_PER_BUCKET = 4.7e-12, 5e-4
"""What an H200 takes: of the bundled profiles, bytes as most of those with AdamW have them, where most bytes were
compressed, and the median of buckets, which take launches. Another GPU takes as much longer for a byte as its memory's
bandwidth is lower."""


def sent_elements(elements: ArrayLike, density: float) -> NDArray[np.float64]:
    """How many of a bucket's elements travel.

    >>> sent_elements([1000, 10, 7], 0.01).tolist()
    [10.0, 1.0, 1.0]
    """
    count = np.asarray(elements, dtype=np.float64)
    return np.minimum(count, np.maximum(1.0, np.ceil(density * count - 1e-9)))


def block_ends(elements: ArrayLike, density: float) -> NDArray[np.float64]:
    """Blocks whose ends are sent; 0 where indices are sent whole."""
    count = np.asarray(elements, dtype=np.float64)
    blocks = np.ceil(count / BLOCK)
    return np.where((blocks > 1) & (4 * blocks < 2 * sent_elements(count, density)), blocks, 0.0)


def message_bytes(elements: ArrayLike, density: float) -> NDArray[np.float64]:
    """The size of the message.

    A thousandth of a million elements: 1000 values, 16 ends of blocks, 1000 indices of 16 bits.

    >>> float(message_bytes(1_000_000, 0.001))
    6064.0
    """
    count = np.asarray(elements, dtype=np.float64)
    ends = block_ends(count, density)
    index_bytes = np.where((count <= BLOCK) | (ends > 0), 2, 4)
    return np.asarray(np.ceil((4 * ends + (4 + index_bytes) * sent_elements(count, density)) / 4) * 4)


def block_width(elements: int, sent: int) -> int:
    """Elements a block when the largest are sought: √(n/k), where the maxima of blocks and the elements of the k best
    blocks are fewest together; below 4 the search does without blocks.

    >>> block_width(1_000_000, 10_000), block_width(1000, 1000)
    (8, 1)
    """
    return min(_WIDEST, 1 << round(math.log2(math.sqrt(elements / sent))))


def selection_bytes(elements: int, density: float) -> int:
    """The most that finding the largest of a bucket takes beside the bucket, as `backbeat.runtime.compressed.topk`
    does it: the maxima of blocks, or the candidates with their indices and magnitudes."""
    if not elements:
        return 0
    sent = int(sent_elements(elements, density))
    width = block_width(elements, sent)
    if width < 4:
        return 4 * elements + 12 * sent
    return max(4 * elements // width, 12 * width * sent) + 12 * sent


def kept_bytes(elements: int, density: float) -> int:
    """What a bucket holds from step to step beside its residual: its message, and the indices in it."""
    return int(message_bytes(elements, density)) + 4 * int(sent_elements(elements, density))
