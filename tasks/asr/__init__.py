"""Speech recognition: audio in, text out."""
