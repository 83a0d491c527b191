"""One module per bench, named like it; each holds a `BENCH`."""
