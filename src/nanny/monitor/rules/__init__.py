"""One file per family; every function marked with @rule is found by folder scan."""
