"""Models as transformers ships them, with document attention, a supervised-only loss and adapters."""
