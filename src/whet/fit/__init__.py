"""Memory and speed of a run before it starts: measured on the device that is here, estimated for one that is not."""
