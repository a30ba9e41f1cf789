"""`whet serve`: an OpenAI-compatible API over the engine, and a chat page."""
