"""Boxes of objects in images: default boxes, matching, the loss of a detector, suppression."""
