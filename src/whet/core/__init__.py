"""Errors, files, configuration, console, distributed processes: what every other package builds on."""
