"""The tasks of the experiments: models, their data, and recipes."""
