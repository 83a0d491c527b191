"""Benchmarks: every figure that the documentation quotes, measured by anyone with one command."""
