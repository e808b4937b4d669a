"""Tests of shardfuse."""
