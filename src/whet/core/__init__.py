"""What every other package stands on: errors, files, configuration, ranks, the console."""
