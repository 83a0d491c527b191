"""KV on disk: pages outlive their eviction and the process, and come back before a prompt runs."""
