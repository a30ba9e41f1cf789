"""The command line: one file per verb, which parses, delegates and prints."""
