"""From a path to undecoded records: files of every kind, compressed, in archives, on the hub."""
