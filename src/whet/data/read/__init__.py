"""Data sources → conversations and documents: files and datasets, record formats, format detection, filters."""
