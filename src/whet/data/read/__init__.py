"""Data sources → conversations and documents: files and datasets, record formats, format detection, filters."""


# Containers: raw records out of files of any kind, in order, streaming and cheap to skip.


# Formats: how a record of a file becomes a conversation or a document.
