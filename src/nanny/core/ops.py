"""The one table of operations: what each computes, what can go wrong in it, and what autocast does to it per device.

Two vocabularies meet here. A running program shows *aten* operations (`_softmax`, `add_`, `_foreach_mul_`, `nll_loss_forward`);
source code names *functions* (`F.softmax`, `x.add_`, `nn.CrossEntropyLoss`). The families below are about aten operations and are
asked as `op in MATMULS`: a family knows an operation under any spelling of its name (`bare_op`). The rest follows torch 2.13
(CUDA: the autocast header; CPU: the documentation and a probe of every operation) and is about functions by their bare name:
`torch.softmax`, `F.softmax` and `x.softmax` are one entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@lru_cache(maxsize=4096)
def bare_op(name: str) -> str:
    """`_foreach_add_` and `add_` as `add`, `_softmax` as `softmax`."""
    return name.removeprefix("_foreach_").strip("_")


class OpFamily(frozenset[str]):
    """Operations that compute alike; `in` takes any spelling of a name."""

    def __contains__(self, op: object) -> bool:
        return isinstance(op, str) and super().__contains__(bare_op(op))

    def __or__(self, other: Iterable[str]) -> OpFamily:  # type: ignore[override]
        return OpFamily(frozenset(self).union(other))


def _family(text: str) -> OpFamily:
    return OpFamily(text.split())


# ---- what an operation computes ----

# Sums of products: kernels add them up in FP32, and the result can be far larger than either factor.
MATMULS = _family("""
    mm bmm addmm baddbmm addbmm matmul linear mkldnn_linear einsum mv addmv dot vdot convolution mkldnn_convolution
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution_overrideable cudnn_convolution""")
FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}  # where the two stand among the arguments
ATTENTIONS = _family("""
    scaled_dot_product_attention scaled_dot_product_attention_math scaled_dot_product_flash_attention
    scaled_dot_product_flash_attention_for_cpu scaled_dot_product_efficient_attention scaled_dot_product_cudnn_attention
    scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention_math_for_mps""")
RECURRENT = _family("lstm gru rnn_tanh rnn_relu thnn_fused_lstm_cell thnn_fused_gru_cell mkldnn_rnn_layer cudnn_rnn miopen_rnn")
NORMALISATIONS = _family("native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm fused_rms_norm rms_norm")
BATCH_NORMS = _family("native_batch_norm cudnn_batch_norm miopen_batch_norm")
BATCHED_MATMULS = _family("bmm baddbmm")  # of two activations: weights stand without a batch
PRODUCTS = _family("mul pow square addcmul prod cumprod")
SQUARES = _family("pow square")
TWO_TERMS = _family("add sub")  # the second may be multiplied by `alpha`
SCALINGS = _family("mul div")  # by a number: a power of two keeps every digit
ADDITIONS = _family("add sub rsub lerp addcdiv index_add scatter_add")
ADDITIVE = _family("add sub rsub sum mean cat stack")  # an error in goes out as it came in
DIFFERENCES = _family("sub rsub")
SHIFTS = _words("add sub rsub mul div neg")  # by a number: what lies apart stays apart
NORMS = _family("norm linalg_vector_norm linalg_matrix_norm cdist cdist_forward euclidean_dist pdist pdist_forward dist")
SPREADS = _family("var var_mean std std_mean")  # a square of differences inside
REDUCTIONS = NORMS | SPREADS | _family("sum nansum mean cumsum dot vdot logsumexp trace")
PERIODIC = _family("sin cos")
EXPONENTIALS = _family("exp exp2 expm1 sinh cosh")
LOGARITHMS = _family("log log2 log10 log1p logit xlogy special_xlogy")
ROOTS = _family("sqrt rsqrt")
DIVISORS = {  # which argument is divided by
    "div": 1, "true_divide": 1, "divide": 1, "floor_divide": 1, "remainder": 1, "fmod": 1, "addcdiv": 2,
    "reciprocal": 0, "rsqrt": 0,
}  # fmt: skip
DIVISIONS = OpFamily(DIVISORS)
WEIGHTINGS = _family("softmax safe_softmax masked_softmax")  # what they give adds up to 1
SOFTMAXES = WEIGHTINGS | {"log_softmax"}
PROBABILITIES = WEIGHTINGS | {"sigmoid"}
RELUS = _family("relu threshold")
LOSS_OPS = _family("""
    mse_loss l1_loss smooth_l1_loss huber_loss nll_loss nll_loss_forward nll_loss_nd nll_loss2d nll_loss2d_forward
    cross_entropy cross_entropy_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss ctc_loss
    multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward poisson_nll_loss cosine_embedding_loss
    hinge_embedding_loss margin_ranking_loss triplet_margin_loss""")
BINARY_LOSSES = _family("binary_cross_entropy binary_cross_entropy_with_logits")  # bounded for targets from 0 to 1 alone

# ---- what can go wrong in it ----

# Operation -> the argument whose zeros have no value, or no finite one.
BROKEN_BY_ZERO = {**dict.fromkeys(LOGARITHMS - {"log1p"}, 0), **DIVISORS, "xlogy": 1, "special_xlogy": 1, "pow": 0}
SINGULAR_AT_ZERO = OpFamily(BROKEN_BY_ZERO)
SINGULAR_AT_ONE = _family("log1p atanh")  # of size 1
# NaN beyond a border that exact numbers never cross: roots of differences, angles of products.
BOUNDED = _family("sqrt rsqrt pow acos asin acosh atanh")
CALL_OTHERS = _family("trilinear linalg_pinv")  # kernels that call operations which autocast casts, and are not cast themselves
OF_TOO_FEW = SPREADS | _family("mean")  # NaN for one number, or for none
PARTIAL = (
    SINGULAR_AT_ZERO | SINGULAR_AT_ONE | BOUNDED | OF_TOO_FEW | _family("ctc_loss")
)  # not all arguments have a finite result, in any format
# Forward is defined and the derivative is not; those that meet that point most often first.
NO_SLOPE = (
    NORMS | _family("sqrt std acos asin acosh linalg_eigh linalg_svd"),
    _family("rsqrt pow log atanh reciprocal"),
    _family("div"),
)
CANCEL = _family("add sub rsub lerp sum mean addmm") | SPREADS  # may leave a small difference of large numbers
GROW = MATMULS | ATTENTIONS | RECURRENT | PRODUCTS | ADDITIONS | REDUCTIONS | EXPONENTIALS | DIVISIONS  # can leave a range
ADD_UP = MATMULS | _family("""
    convolution_backward sum mean cumsum index_add index_put index_put_impl scatter_add embedding_dense_backward avg_pool2d
    avg_pool2d_backward adaptive_avg_pool2d adaptive_avg_pool2d_backward""")  # on magnitudes they give their own conditioning
JUMP = _family("fmod remainder floor_divide nan_to_num")  # rounding an argument moves the result by a whole period
SCATTERS = _family("""
    embedding_dense_backward embedding_bag_dense_backward index_put index_put_impl unsafe_index_put index_add index_reduce
    scatter_add scatter_reduce""")
PROTECT = _family("add sub rsub clamp_min clamp maximum where full fill masked_fill addcmul")  # where an eps is put in
READ_LOGITS = SOFTMAXES | LOSS_OPS | {"sigmoid"}

# ---- what it decides, draws and moves ----

DECISIONS = _family("argmax argmin topk sort argsort multinomial searchsorted bucketize kthvalue")
CHOICES = DECISIONS | _family("max min median mode")  # the index they give with the value is a decision, too
SELECT = _family("threshold_backward max_pool2d_with_indices_backward clamp where relu maximum minimum")  # choose among values
LOOKUPS = _family("embedding index index_select gather one_hot scatter")
# May give whole numbers that are meant to be whole.
COUNT = _family("to_copy copy arange cumsum linspace embedding add mul sum index stack")
# Random numbers that depend on nothing else. fp32 draws what bf16 and fp16 draw, before rounding; fp64 draws other numbers.
DRAWS = _family("rand rand_like randn randn_like uniform normal exponential cauchy log_normal geometric")
REPLACES = DRAWS | _family("copy fill zero set resize")  # not added to, but made anew
CASTS = _family("to_copy to copy half")
SAME_VALUE = _family("to_copy clone copy detach alias expand contiguous")
JOINS = _family("cat stack")
COPIES = JOINS | _family("clone unsafe_view reshape_copy")  # everything that comes in goes out
MOVES = COPIES | _family("""
    index_select gather embedding slice_scatter select_scatter repeat flip roll tril triu index constant_pad_nd
    split_with_sizes_copy unbind_copy view_copy permute_copy expand_copy select_copy slice_copy transpose_copy""")
RESHAPES = _family("""
    view unsafe_view reshape_alias t transpose permute expand squeeze unsqueeze slice select split unbind""")
# Hand on what comes in, and make no NaN or infinity of finite numbers.
HARMLESS = RESHAPES | _words("""
    cat stack relu threshold clone index dropout native_dropout leaky_relu tanh sigmoid neg mean abs min max amin amax minimum
    maximum masked_fill where""")
CONSTANTS = _family("full full_like new_full fill masked_fill scalar_tensor index_fill constant_pad_nd lift_fresh zeros ones")
UNWRITTEN = _family("empty empty_like empty_strided empty_permuted new_empty new_empty_strided")
SHAPED_ALIKE = _family("zeros_like ones_like full_like rand_like randn_like new_zeros new_ones new_full")  # of an input its shape
MEMORY = UNWRITTEN | _family("""
    resize resize_as set zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full fill zero scalar_tensor
    lift_fresh lift efficientzerotensor record_stream local_scalar_dense is_pinned pin_memory has_same_storage_numel""")

# Do something else than computing: files, streams, assertions.
EFFECTS = _family("""
    from_file record_stream pin_memory is_pinned assert_async assert_scalar functional_assert_async functional_assert_scalar
    print set set_data""")
# Operation -> arguments whose gradient torch computes by another formula, with other bits, while any dispatch mode is on.
OTHER_GRADIENT = {
    "prod": (0,), "cumprod": (0,), "masked_fill": (2,), "linalg_householder_product": (0, 1), "ormqr": (0, 1),
}  # fmt: skip

# ---- what autocast does to functions ----

LINEAR_ALGEBRA = _words("""
    conv1d conv2d conv3d bmm mm linear baddbmm addmm addbmm matmul einsum scaled_dot_product_attention""")

CUDA_LOWER = LINEAR_ALGEBRA | _words("""
    conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmv addr mv linalg.vecdot vecdot
    chain_matmul linalg.multi_dot lstm gru rnn lstm_cell gru_cell rnn_tanh_cell multi_head_attention""")

CUDA_FLOAT32 = _words("""
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm rms_norm group_norm frobenius_norm nuclear_norm cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss
    margin_ranking_loss multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss
    binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp interpolate upsample prod softmax log_softmax
    cumprod cumsum linalg.vector_norm linalg.matrix_norm norm sum cross_entropy normalize softmin gaussian_nll_loss
    pairwise_distance""")

CUDA_WIDEST = _words("addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add cat stack")
CUDA_ERROR = _words("binary_cross_entropy")

CPU_LOWER = LINEAR_ALGEBRA | _words("conv_transpose1d conv_transpose2d conv_transpose3d lstm gru rnn multi_head_attention")
CPU_FLOAT32 = _words("""
    prod quantile nanquantile cdist mse_loss l1_loss smooth_l1_loss huber_loss nll_loss cross_entropy kl_div ctc_loss
    binary_cross_entropy binary_cross_entropy_with_logits multi_margin_loss triplet_margin_loss poisson_nll_loss
    cosine_embedding_loss hinge_embedding_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss stft
    inverse pinverse logdet det cholesky svd qr solve lstsq eig trace grid_sample interpolate polar
    linalg.svd linalg.inv linalg.solve linalg.qr linalg.eig linalg.eigh linalg.eigvals linalg.eigvalsh linalg.cholesky
    linalg.det linalg.slogdet linalg.pinv linalg.lstsq linalg.matrix_norm linalg.cond linalg.matrix_rank
    fft.fft fft.ifft fft.rfft fft.irfft fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.fftn fft.ifftn""")
CPU_WIDEST = _words("cat stack index_copy")

# Operations that raise on a half tensor wherever nothing promotes it first.
NEEDS_FLOAT = _words("""
    linalg.svd linalg.svdvals linalg.inv linalg.inv_ex linalg.solve linalg.solve_ex linalg.qr linalg.eig linalg.eigh
    linalg.eigvals linalg.eigvalsh linalg.cholesky linalg.cholesky_ex linalg.det linalg.slogdet linalg.pinv linalg.lstsq
    linalg.matrix_exp linalg.solve_triangular linalg.lu linalg.lu_factor linalg.matrix_rank linalg.cond
    inverse pinverse svd qr cholesky det logdet slogdet solve lstsq symeig eig matrix_exp cholesky_solve cholesky_inverse
    quantile nanquantile triangular_solve ctc_loss""")

LOSSES = _words("""
    cross_entropy nll_loss kl_div mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_with_logits multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss soft_margin_loss
    triplet_margin_loss triplet_margin_with_distance_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
    poisson_nll_loss gaussian_nll_loss ctc_loss loss""")

# of two tensors of a kind; the others compare with class numbers, or take more than a target
PAIRWISE_LOSSES = _words("""
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss
    soft_margin_loss multilabel_soft_margin_loss hinge_embedding_loss gaussian_nll_loss""")
CLASS_LOSSES = _words("cross_entropy nll_loss ctc_loss multi_margin_loss multilabel_margin_loss")  # targets are class numbers

SHAPE = _words("""
    view reshape transpose permute contiguous squeeze unsqueeze flatten unflatten expand expand_as repeat
    repeat_interleave chunk split unbind select narrow index_select gather t T mT movedim swapaxes swapdims roll flip
    detach clone view_as reshape_as take unfold tile take_along_dim broadcast_to requires_grad_ to_dense cpu cuda
    pin_memory diagonal diag tril triu rot90 as_strided masked_select scatter masked_scatter alias expand_copy detach_
    hsplit vsplit tensor_split ravel atleast_1d atleast_2d item_like data retain_grad""")

SAME_DTYPE = SHAPE | _words("""
    relu relu_ gelu silu mish sigmoid tanh elu leaky_relu hardswish hardtanh hardsigmoid relu6 selu celu softsign tanhshrink
    logsigmoid dropout dropout1d dropout2d dropout3d alpha_dropout batch_norm instance_norm avg_pool1d avg_pool2d
    avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool2d pad mean var std sqrt square abs neg clamp clamp_min clamp_max clip max min amax amin median
    where masked_fill round floor ceil sign sin cos erf masked_fill_ fill_ zero_ mul add sub div true_divide multiply
    subtract divide mul_ add_ sub_ div_ clamp_ lerp lerp_ nan_to_num sort topk cummax cummin logcumsumexp addcmul
    addcdiv index_add scatter_add scatter_reduce index_fill outer ger nansum nanmean maximum minimum fmod remainder
    softmax log_softmax sum exp log log1p expm1 pow norm cumsum cumprod prod logsumexp rsqrt reciprocal softplus
    layer_norm group_norm rms_norm normalize cosine_similarity interpolate matmul bmm mm linear conv1d conv2d conv3d
    einsum baddbmm addmm dot mv tensordot kron linalg.norm linalg.vector_norm atan2 log2 log10 cross_entropy mse_loss l1_loss
    smooth_l1_loss huber_loss nll_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits cdist
    scaled_dot_product_attention cat stack concat hstack vstack meshgrid index_put polar threshold glu logaddexp
    pixel_shuffle affine_grid grid_sample bilinear embedding_bag softmin rsub dist pairwise_distance
    conv_transpose1d conv_transpose2d conv_transpose3d prelu xlogy tan cosh sinh acos asin
    exp_ log_ sqrt_ rsqrt_ pow_ sigmoid_ tanh_ softmax_ neg_ abs_ zeros_like ones_like empty_like full_like rand_like
    randn_like new_zeros new_ones new_full new_empty new_tensor lerp bernoulli multi_head_attention lstm gru rnn
    linalg.inv linalg.solve linalg.svd linalg.qr linalg.cholesky linalg.eigh inverse svd cholesky
    cross renorm trace index_add_ index_copy_ scatter_ scatter_add_ index_put_ masked_scatter_ copy_ trunc frac""")

# Operations whose result depends on the dtypes of several operands; all others follow their first.
PROMOTING = _words("""
    add sub mul div pow maximum minimum fmod remainder floor_divide atan2 outer ger logaddexp xlogy rsub addcmul addcdiv kron
    dist""")  # half beside float32 is float32; in place it stays half
SEVERAL_OPERANDS = PROMOTING | _words("""
    matmul bmm mm einsum baddbmm addmm addbmm dot mv tensordot lerp cat stack hstack vstack cross cdist linear conv1d
    conv2d conv3d
    mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits bilinear
    cosine_similarity pairwise_distance polar scaled_dot_product_attention max min meshgrid""")

# What the checker asks of functions; `phi`, `moved`, `getitem` are its own words for joins, copies and items.
ARITHMETIC = _words("add sub mul div pow neg floor_divide remainder phi")
LOG_FUNCTIONS = ("log", "log2", "log10")
RANGE_FUNCTIONS = ("arange", "range", "linspace")
COUNTING_FUNCTIONS = _words("arange range randint argmax argsort nonzero randperm cumsum multinomial bincount")
SUM_FUNCTIONS = ("sum", "cumsum", "mean", "prod", "cumprod", "nansum", "norm", "linalg.vector_norm", "logcumsumexp", "nanmean")
RUNNING_SUMS = ("cumsum", "cumprod", "logcumsumexp")
PLAIN_SUMS = ("sum", "mean", "nansum")
MAX_FUNCTIONS = ("max", "amax", "logsumexp", "maximum", "cummax")
BOUNDING_FUNCTIONS = _words("clamp clamp_max clamp_ log_softmax logsigmoid tanh sigmoid minimum softmax")
FFT_FUNCTIONS = frozenset(
    f"fft.{kind}" for kind in _words("fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft")
)
# uses of a gradient that the loss scale changes: all but multiplying by a number
NONLINEAR_FUNCTIONS = _words("""
    pow square norm linalg.vector_norm abs std var max min amax amin item tolist numpy clamp clamp_ clamp_min clamp_max clip_ sum
    mean median sqrt sign sign_ histc log exp""")
ACCUMULATING_FUNCTIONS = _words("add sub mul div lerp add_ sub_ mul_ div_ lerp_ getitem view detach phi moved cuda")
FORMULA_FUNCTIONS = _words("pow square abs neg sqrt exp mul div sub add mean std var sum norm")  # to be run in float32 as one
CREATING_FUNCTIONS = ("zeros", "ones", "empty", "full", "tensor")
LIKE_FUNCTIONS = _words("zeros_like ones_like full_like empty_like rand_like randn_like")
WRITTEN_NUMBERS = _words("tensor as_tensor full")  # of what the code writes down
FILLING_FUNCTIONS = _words("masked_fill masked_fill_ full full_like fill_ new_full where")
PICKING_FUNCTIONS = _words("max min sort topk median")  # along a dimension they give values and indices
WRITING_FUNCTIONS = {  # by index -> the argument that is written
    "index_add_": 3, "index_copy_": 3, "scatter_": 3, "scatter_add_": 3, "index_put_": 2, "masked_scatter_": 2,
    "index_add": 3, "index_copy": 3, "masked_scatter": 2, "scatter": 3,
}  # fmt: skip
SAME_VALUES = SHAPE | {"getitem", "view"}

TO_BOOL = _words("isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not any all isclose allclose equal")
TO_INT = _words(
    "argmax argmin argsort nonzero bincount searchsorted long int multinomial randint randperm size numel count_nonzero"
)
CREATES = _words(
    "zeros ones empty full rand randn tensor as_tensor linspace logspace eye"
)  # float32 unless dtype= says otherwise

IN_PLACE = _words("""
    mul_ add_ sub_ div_ clamp_ lerp_ masked_fill_ fill_ zero_ copy_ exp_ log_ sqrt_ pow_ index_add_ index_copy_ scatter_
    scatter_add_ index_put_ masked_scatter_ relu_ sigmoid_ tanh_ neg_ abs_ addcmul_ addcdiv_""")

# torch.nn layers -> the operation that a call of the layer runs
LAYERS = {
    "Linear": "linear", "Conv1d": "conv1d", "Conv2d": "conv2d", "Conv3d": "conv3d", "Bilinear": "bilinear",
    "ConvTranspose1d": "conv_transpose1d", "ConvTranspose2d": "conv_transpose2d", "ConvTranspose3d": "conv_transpose3d",
    "LSTM": "lstm", "GRU": "gru", "RNN": "rnn", "LSTMCell": "lstm", "GRUCell": "gru",
    "MultiheadAttention": "multi_head_attention",
    "LayerNorm": "layer_norm", "GroupNorm": "group_norm", "RMSNorm": "rms_norm", "BatchNorm1d": "batch_norm",
    "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm", "SyncBatchNorm": "batch_norm", "InstanceNorm1d": "instance_norm",
    "InstanceNorm2d": "instance_norm", "InstanceNorm3d": "instance_norm",
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Softmin": "softmin", "Softplus": "softplus", "Sigmoid": "sigmoid",
    "LogSigmoid": "logsigmoid", "Tanh": "tanh", "ReLU": "relu", "ReLU6": "relu6", "GELU": "gelu", "SiLU": "silu",
    "Mish": "mish", "ELU": "elu", "LeakyReLU": "leaky_relu", "PReLU": "prelu", "Hardswish": "hardswish", "GLU": "glu",
    "Identity": "clone", "Flatten": "flatten", "Unflatten": "unflatten", "Dropout": "dropout", "Dropout1d": "dropout1d",
    "Dropout2d": "dropout2d", "Dropout3d": "dropout3d", "AvgPool1d": "avg_pool1d", "AvgPool2d": "avg_pool2d",
    "MaxPool1d": "max_pool1d", "MaxPool2d": "max_pool2d", "AdaptiveAvgPool1d": "adaptive_avg_pool1d",
    "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "Upsample": "interpolate", "PixelShuffle": "pixel_shuffle",
    "Embedding": "embedding", "EmbeddingBag": "embedding_bag", "CosineSimilarity": "cosine_similarity",
    "CrossEntropyLoss": "cross_entropy", "NLLLoss": "nll_loss", "MSELoss": "mse_loss", "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss", "HuberLoss": "huber_loss", "KLDivLoss": "kl_div", "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits", "CTCLoss": "ctc_loss", "TripletMarginLoss": "triplet_margin_loss",
    "MultiMarginLoss": "multi_margin_loss", "MarginRankingLoss": "margin_ranking_loss", "PoissonNLLLoss": "poisson_nll_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss", "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss", "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "SoftMarginLoss": "soft_margin_loss", "GaussianNLLLoss": "gaussian_nll_loss",
}  # fmt: skip
CONTAINERS = _words("Sequential ModuleList ModuleDict ParameterList ParameterDict DataParallel")
NORM_LAYERS = frozenset(name for name in LAYERS if "Norm" in name)

DTYPES = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32", "float64": "fp64",
    "double": "fp64", "int8": "int", "uint8": "int", "int16": "int", "short": "int", "int32": "int", "int": "int",
    "int64": "int", "long": "int", "bool": "bool",
}  # fmt: skip
TENSOR_TYPES = {
    "HalfTensor": "fp16",
    "BFloat16Tensor": "bf16",
    "FloatTensor": "fp32",
    "DoubleTensor": "fp64",
    "LongTensor": "int",
}
ALIASES = {
    "sdpa": "scaled_dot_product_attention", "special.expit": "sigmoid", "special.logsumexp": "logsumexp",
    "special.softmax": "softmax", "special.log_softmax": "log_softmax", "special.log1p": "log1p", "special.xlogy": "xlogy",
    "concat": "cat", "concatenate": "cat", "clip": "clamp", "multiply": "mul", "divide": "div", "subtract": "sub",
    "true_divide": "div", "greater": "gt", "less": "lt", "linalg.matmul": "matmul", "nn.functional.softmax": "softmax",
    "special.exp2": "exp2", "negative": "neg", "absolute": "abs", "det": "linalg.det", "linalg.norm": "linalg.vector_norm",
}  # fmt: skip


def autocast_list(op: str, device: str) -> str:
    """`lower`, `float32`, `widest`, `error` or `` (left alone) for an operation under autocast of that device.

    With the device unknown, only what both devices agree on counts, else `unknown`.
    """
    if op.endswith("_"):  # in-place operations are never autocast
        return ""
    cuda = _which(op, CUDA_LOWER, CUDA_FLOAT32, CUDA_WIDEST, CUDA_ERROR)
    if device not in ("cpu", ""):
        return cuda
    cpu = _which(op, CPU_LOWER, CPU_FLOAT32, CPU_WIDEST, frozenset())
    if device == "cpu":
        return cpu
    return cuda if cuda == cpu else "unknown"


def _which(op: str, lower: frozenset[str], float32: frozenset[str], wide: frozenset[str], error: frozenset[str]) -> str:
    if op in lower:
        return "lower"
    if op in float32:
        return "float32"
    if op in wide:
        return "widest"
    return "error" if op in error else ""
