"""Registered language-model experiments."""
