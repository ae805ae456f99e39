"""Questions to recorded runs: each is a function that returns a record, and a command that renders it. No torch."""
