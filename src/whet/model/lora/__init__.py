"""LoRA: adapters through peft, and fused operators that compute them together with the layers they adapt."""
