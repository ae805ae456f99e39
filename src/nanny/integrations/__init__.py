"""The nanny where a framework holds the loop; each module here imports its framework, nothing else does."""
