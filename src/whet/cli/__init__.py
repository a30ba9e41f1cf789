"""The command line: one file a verb; parses, delegates, prints."""
