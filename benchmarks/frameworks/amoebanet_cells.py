"""The cells of AmoebaNet-D."""

from __future__ import annotations

OPERATIONS = {
    "normal": (
        *((1, "1x1"), (1, "max3"), (1, "none"), (0, "1x7_7x1"), (0, "1x1"), (0, "1x7_7x1")),
        *((2, "max3"), (2, "none"), (1, "avg3"), (5, "1x1")),
    ),
    "reduction": (
        *((0, "max2"), (0, "max3"), (2, "none"), (1, "3x3"), (2, "1x7_7x1"), (2, "max3")),
        *((3, "none"), (1, "max2"), (2, "avg3"), (3, "1x1")),
    ),
}
"""{kind: (state, operation) of the five sums of a cell, two for each}"""

OUTPUTS = {"normal": (0, 3, 4, 6), "reduction": (4, 5, 6)}
"""{kind: states that are concatenated}"""
