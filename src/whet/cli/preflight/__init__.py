"""The verbs of whet that come before a run: what the machine, the data and the settings are like."""
