"""What several benchmarks share; the commands are one folder up."""
