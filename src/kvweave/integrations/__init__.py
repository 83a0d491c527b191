"""kvweave inside other engines. No other package of kvweave imports from here."""

BACKEND = "fuzzy_match"
"""The name under which SGLang offers the plug-in: `--radix-cache-backend fuzzy_match`."""
