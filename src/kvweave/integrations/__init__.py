"""kvweave inside other engines. Nothing in kvweave imports from here."""
