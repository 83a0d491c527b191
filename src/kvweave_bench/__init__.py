"""Benchmarks: every figure that the documentation quotes is measured by one command."""
