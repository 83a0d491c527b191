"""Kits that several tests share: engines, worlds, servers, models."""
