"""Tests of several ranks: threads, and real gloo processes."""
