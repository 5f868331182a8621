"""Experiments of speech recognition."""
