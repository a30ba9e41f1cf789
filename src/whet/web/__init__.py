"""What `whet dash` and `whet serve` share: who may send requests, how large, and how the server starts and stops."""
