"""Records of runs, and HTML pages about runs and advice."""
