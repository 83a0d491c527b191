"""Reuse of KV between texts of equal meaning: donors found by meaning, judged by their facts."""
