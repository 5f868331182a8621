"""Experiments of translation."""
