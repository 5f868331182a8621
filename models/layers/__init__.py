"""Layers, one idea per file, each a pure function of an explicit theta."""
