"""The parts of `evidence.py`: the plan, its runs, and the report."""
