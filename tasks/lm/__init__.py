"""Language modelling: task, text input, decoding."""
