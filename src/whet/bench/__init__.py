"""Speed and memory beside other tools: the same model shape, conversations and settings, a process for each."""
