"""Raw files → conversations → tokens with loss masks → store → plan → packed batches."""
