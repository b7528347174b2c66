"""Keras optimizers that exchange compressed gradients in every step."""
