"""Finding target sequences with a model: what it has to offer, and the searches over it."""
