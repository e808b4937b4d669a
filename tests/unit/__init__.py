"""Tests that need no second process."""
