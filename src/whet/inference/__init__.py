"""Inference: batched generation with a KV cache, chat, and scoring on tasks."""
