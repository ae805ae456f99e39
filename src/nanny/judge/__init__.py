"""Records to findings. Rules never touch a tensor, so they judge live, replay a stored run, and are tested with literals."""
