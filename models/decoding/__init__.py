"""Searches for target sequences, and the interface that a model implements for them."""
