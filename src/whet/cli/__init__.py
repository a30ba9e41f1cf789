"""The command line: one file per verb, which parses, delegates and prints."""

from whet.core.launch_env import keep_bytecode

keep_bytecode()  # before anything else is imported
