"""Compares answers from moved KV with the same model's cold answers."""
