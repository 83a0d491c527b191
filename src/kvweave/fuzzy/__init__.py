"""Reuse beyond the prefix: providers nominate donors, the backend verifies, plans and moves."""
