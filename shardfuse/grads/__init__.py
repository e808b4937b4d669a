"""Gradients: where they lie, whose they are, and how they are averaged."""
