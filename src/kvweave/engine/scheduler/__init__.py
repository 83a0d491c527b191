"""Decides which tokens each step computes, and which requests wait or make room."""
