"""What the monitor saw, in SQLite: `writer` for the training process, `reader` for everyone else, `schema` for humans.

No import of this package loads torch.
"""
