"""Export a trained model: write it, load it back, compare it with the trained one."""
