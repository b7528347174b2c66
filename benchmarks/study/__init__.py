"""The parts of `evidence.py`: tasks, the plan, runs that survive, and the report."""
