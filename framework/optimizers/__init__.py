"""Optimizers: pure updates of flat dicts keyed by weight path."""
