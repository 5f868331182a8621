"""Sequence-to-sequence tasks: parallel corpora, input, task, translation, scores."""
