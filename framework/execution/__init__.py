"""How a training step is laid over devices. Layers do not import it; it imports no layer."""
