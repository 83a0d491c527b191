"""The explorer: a page that shows the cache and the source of each recent prompt's KV."""
