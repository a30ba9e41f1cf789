"""Convert checkpoints of other trainers to Hugging Face model folders."""
