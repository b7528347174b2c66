"""Trainers of one process and of worker processes, with checkpoints."""
