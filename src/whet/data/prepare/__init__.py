"""Sources → store: read, render, tokenize and write, in parallel, once per content."""
