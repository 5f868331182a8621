"""Segmentation: a class for every pixel of an image."""
