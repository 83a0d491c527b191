"""The self-check at start: measures how moved KV changes a model's answers."""
