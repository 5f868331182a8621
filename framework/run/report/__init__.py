"""What a run tells: lines on a console, curves, TensorBoard events, and a summary at its end."""
