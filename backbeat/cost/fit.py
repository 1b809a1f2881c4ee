"""Straight lines through measured times."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def relative_line(sizes: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """(alpha, beta) that minimise the sum of squared *relative* errors of alpha + beta·size.

    Relative, because the points span six decades: an absolute fit would see the largest alone.

    >>> alpha, beta = relative_line(np.array([1e3, 1e6, 1e8]), 2e-4 + 1e-9 * np.array([1e3, 1e6, 1e8]))
    >>> round(alpha, 9), round(beta, 15)
    (0.0002, 1e-09)
    """
    weight = 1.0 / np.maximum(seconds, 1e-12)
    # Columns are scaled to comparable size, or the normal equations lose half their digits.
    scale = float(sizes.max()) or 1.0
    columns = np.stack([weight, weight * sizes / scale], axis=1)
    (alpha, beta), *_ = np.linalg.lstsq(columns, np.ones_like(seconds), rcond=None)
    return float(alpha), float(beta) / scale
