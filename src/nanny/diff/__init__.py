"""Where a model in BF16 or FP16 parts from its FP32 self: `auto_diff`, `nanny diff`."""
