"""A sandbox for code that a model wrote: namespaces, seccomp, limits."""
