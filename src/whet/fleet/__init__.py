"""Starting runs and keeping them alive. Speaks to runs through commands and the files in their folders alone."""
