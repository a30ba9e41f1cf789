"""Built-in data: endless, reproducible generated tasks with disjoint train and held-out splits."""
