"""Single operations under watch: `CompareWithCPU`, `NanInfTracker`, `nanny trace`, `nanny replay`."""
