"""What each of the other experiments runs, and what its rows say."""
