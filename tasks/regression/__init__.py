"""Regression: numbers for each example."""
