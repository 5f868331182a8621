"""Registered sequence-to-sequence experiments."""
