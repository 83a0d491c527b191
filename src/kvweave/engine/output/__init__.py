"""Turns sampled tokens into the text, stops and deltas of an answer."""
