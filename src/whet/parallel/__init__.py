"""How one model is spread over several processes."""
