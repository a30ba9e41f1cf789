"""Loading model weights: from a folder, from the hub, at random, or as placeholders for sharding."""
