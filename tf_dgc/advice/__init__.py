"""Predicts what a step takes with each method, before the first run."""
