"""Experiments that train several tasks with one model."""
