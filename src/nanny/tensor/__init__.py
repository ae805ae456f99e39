"""What a low-precision format would do to one tensor: `analyze_tensor`, `nanny tensor`."""
