"""`whet bench`: speed and memory compared with other tools, each in a process of its own."""
