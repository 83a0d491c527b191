"""Prompts with known overlap, built from real text and a seed, and an oracle of the overlap."""
