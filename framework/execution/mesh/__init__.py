"""Execution of one program over all devices of a mesh, tensors split by rules (DTensor)."""
