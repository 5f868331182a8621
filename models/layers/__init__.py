"""Layers, one idea a file, each a pure function of an explicit theta."""
