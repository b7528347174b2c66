"""Algorithms that the package is compared with."""
