"""The engine: requests, scheduling, execution, sampling and output."""
