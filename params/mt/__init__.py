"""Registered experiments of sequence to sequence."""
