"""Fast primitives with gradients of their own, of which ordinary layers are built."""
