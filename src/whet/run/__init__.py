"""The life of a run: assemble, start, resume, finish, replay of a saved batch."""
