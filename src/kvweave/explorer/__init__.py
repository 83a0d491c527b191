"""The explorer: what is cached, where each prompt's KV came from, and why not from elsewhere."""
