"""Hooks and patches that see a training step without changing it. What they see goes on as numbers or named tensors."""
