"""Starting runs under torchrun and restarting them after a crash; sees runs through commands and their folders alone."""
