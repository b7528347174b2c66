"""Modules that several benchmarks share; the commands are in the parent folder."""
