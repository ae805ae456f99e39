"""One function per rule, by family; see `nanny.check.registry` for their shape."""
