"""Classification: one label for each example."""
