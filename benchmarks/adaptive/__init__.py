"""What `adam.py` and `horizons.py` train, and what they and `inner.py` report."""
