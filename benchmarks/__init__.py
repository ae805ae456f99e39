"""What the tool costs. `python -m benchmarks` runs all of them; every ratio comes with an A/A control."""
