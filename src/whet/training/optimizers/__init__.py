"""AdamW (fp32, bf16 and 8-bit states) and Muon."""
