"""From a decoded record to a conversation or a document: every format, and the shapes that no format reads."""
