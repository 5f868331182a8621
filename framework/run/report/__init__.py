"""Reporting of a run: console lines, curves, TensorBoard events, and a summary at the end."""
