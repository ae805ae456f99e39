"""One file per family; every function marked with @cause is found by folder scan."""
