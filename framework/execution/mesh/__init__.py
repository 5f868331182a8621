"""One program for all devices of a mesh, whose tensors are sharded by rules (DTensor)."""
