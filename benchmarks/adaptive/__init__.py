"""What `adam.py` trains, and what Adam correction is compared with."""
