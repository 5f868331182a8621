"""Host-side input: the batch of step s is a pure function of data, seed and s."""
