"""Compares runs, and groups of runs that differ in the seed: Params, curves, samples, cost."""
