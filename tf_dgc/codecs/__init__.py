"""Positions, values and buffers as 32-bit words, and back (wire_format.md)."""
