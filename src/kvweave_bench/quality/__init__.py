"""Answers from moved KV against the same model's cold ones: distributions, texts, facts."""
