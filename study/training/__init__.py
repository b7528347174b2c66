"""How a run trains: workers of one process or of several, saved on the way."""
