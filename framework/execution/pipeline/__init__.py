"""Pipelined execution: a model cut into stages, a mini-batch cut into micro-batches."""
