"""Runs the trials of a sweep one after the other, and resumes a sweep that was killed."""
