"""Packs the rows of a step into a batch and runs it through the model."""
