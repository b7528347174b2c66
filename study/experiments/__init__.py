"""The runs of the other experiments, and their tables."""
