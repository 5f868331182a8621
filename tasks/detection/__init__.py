"""Detection: the boxes of objects in images."""
