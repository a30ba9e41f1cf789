"""Looking at runs; it knows only the files in a run directory."""
