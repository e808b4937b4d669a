"""Benchmarks of shardfuse against every peer; ``python -m launch.bench``, see README.md."""
