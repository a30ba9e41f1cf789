"""GGUF files, and the programs that load them: llama.cpp and Ollama."""
