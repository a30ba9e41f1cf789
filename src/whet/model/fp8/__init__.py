"""fp8 training: casting with scales, linear layers and gated MLPs that multiply in 8 bits."""
