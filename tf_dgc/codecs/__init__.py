"""Positions, values and buffers as 32-bit words, and back (docs/contributing/wire_format.md)."""
