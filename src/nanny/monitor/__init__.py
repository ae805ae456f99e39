"""A training run under watch: `MixedPrecisionNanny`, `watch_model`, `check_loss_scale`, `nanny run`."""
