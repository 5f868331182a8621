"""Contrastive learning: embeddings of images and texts that belong together are similar."""
