"""Models: fetched, loaded, inspected and tried, so that the engine may trust what it is given."""

from kvweave.models.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
