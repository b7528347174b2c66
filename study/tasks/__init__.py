"""What the experiments train: models, their data, and recipes."""
