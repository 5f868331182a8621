"""Sequence to sequence: parallel corpora, input, task, translation, scores."""
