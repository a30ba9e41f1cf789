"""Single-device execution: compilation, CUDA graphs, activation recomputation, CPU offload."""
