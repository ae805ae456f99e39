"""One function per mistake that can be mended, by family like `rules/`; see `nanny.check.fixers` for their shape."""

# What a plain check says can be fixed. The functions themselves need libcst, which takes longer to import than a file to check.
FIXABLE = frozenset(
    (
        *("SCALER_CLIP_BEFORE_UNSCALE", "SCALER_GRADS_STILL_SCALED", "SCALER_UPDATE_MISSING", "SCALER_NOT_SAVED"),
        *("REGION_LOSS_OUTSIDE", "REGION_BCE", "REGION_DEPRECATED"),
        *("NUM_MASK_CONSTANT", "NUM_EPS_UNDERFLOW", "NUM_SOFTMAX_HALF", "NUM_REDUCE_HALF", "NUM_EXP_HALF", "NUM_INDEXED_WRITE"),
        *("NUM_LOG_OF_SOFTMAX", "NUM_LOG_OF_SIGMOID", "NUM_LOGSUMEXP", "NUM_UNSUPPORTED_OP"),
    )
)
