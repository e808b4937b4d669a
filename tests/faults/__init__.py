"""Faults of one rank among several, and what the others learn of them: `python -m tests.faults`."""
