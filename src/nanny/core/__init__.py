"""The nouns of every room: findings, steps, formats, limits, operations, numbers as text. Plain data: no torch, no files."""
