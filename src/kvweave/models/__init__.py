"""Models: fetching, loading, inspection, and the compatibility check."""

from kvweave.models.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
