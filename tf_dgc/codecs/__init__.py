"""Positions, values and buffers as 32-bit words, and back (docs/wire_format.md)."""
