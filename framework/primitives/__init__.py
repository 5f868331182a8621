"""Implementations of the primitives in ops.py, with custom gradients."""
