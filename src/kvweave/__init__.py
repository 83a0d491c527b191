"""kvweave serves language models and never computes the same text twice."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvweave")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+source"
