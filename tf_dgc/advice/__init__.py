"""Predicts the time of a step with each method, before the first run."""
