"""The cost model: operations, bytes and times of pieces, and the timing of a schedule."""
