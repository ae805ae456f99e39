"""A PyTorch program seen without being disturbed: events, steps, places, operations, twins."""
