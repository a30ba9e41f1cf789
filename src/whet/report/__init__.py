"""Reports on runs, read from the files of a run folder alone."""
