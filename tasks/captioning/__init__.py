"""Image captioning: a text that describes an image."""
