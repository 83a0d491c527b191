"""Measures, at start, whether a model stands it that its KV is moved."""
