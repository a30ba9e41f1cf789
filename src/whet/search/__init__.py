"""`whet search`: many runs with values drawn from ranges; bad ones stop early, the best one's recipe is the result."""
