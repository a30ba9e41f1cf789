"""Containers: raw records out of files of any kind, in order, streaming and cheap to skip."""
