"""Names that torch and its libraries give, and sets of operations that only the checker needs."""

from __future__ import annotations

from ...core.ops import SHAPE


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


GRAD_SCALERS = _words("GradScaler ShardedGradScaler")
OPTIMIZERS = _words("""
    Optimizer Adam AdamW SGD RMSprop Adagrad Adadelta Adamax NAdam RAdam SparseAdam LBFGS Rprop ASGD Muon Adafactor Lion LAMB
    Lamb LARS FusedAdam FusedLAMB FusedSGD FusedAdagrad FusedNovoGrad Adam8bit AdamW8bit PagedAdamW PagedAdamW8bit
    PagedAdamW32bit Lion8bit SGD8bit DeepSpeedCPUAdam OnebitAdam AdamWScheduleFree SGDScheduleFree AdamWFp8 AdamW4bit""")
CLIPS = _words("""
    clip_grad_norm_ clip_grad_value_ clip_grad_norm clip_grads_with_norm_ get_total_norm adaptive_clip_grad dispatch_clip_grad""")
WRAPPERS = _words("DistributedDataParallel DataParallel FullyShardedDataParallel DDP FSDP fully_shard")
TRAINERS = _words("Trainer Seq2SeqTrainer SFTTrainer DPOTrainer ORPOTrainer KTOTrainer PPOTrainer GRPOTrainer RewardTrainer")
TRAINING_ARGUMENTS = _words("TrainingArguments Seq2SeqTrainingArguments SFTConfig DPOConfig GRPOConfig RewardConfig")
MODULE_METHODS = _words("""
    train eval requires_grad_ parameters named_parameters modules named_modules children named_children state_dict
    load_state_dict apply zero_grad register_buffer clip_grad_norm_ register_parameter""")
FRAMEWORK_REGIONS = _words("autocast maybe_autocast autocast_smart_context_manager get_autocast_context")
DEVICE_TYPES = _words("""
    cpu cuda ipu xpu mkldnn hip ve fpga maia xla lazy vulkan mps meta hpu mtia privateuseone npu musa""")
# methods of loggers and writers: what they are given is looked at by people
LOG_METHODS = _words("""
    print log log_dict log_metrics info debug warning error add_scalar add_scalars add_histogram histogram write writerow dump
    track watch""")

MATRIX_PRODUCTS = _words("""
    matmul mm bmm linear einsum addmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention""")
ARITHMETIC = _words("add sub mul div pow neg floor_divide remainder phi")
LOGARITHMS = ("log", "log2", "log10")
COUNTING = _words("arange range randint argmax argsort nonzero randperm cumsum multinomial bincount")
REDUCTIONS = ("sum", "cumsum", "mean", "prod", "cumprod", "nansum", "norm", "linalg.vector_norm", "logcumsumexp", "nanmean")
MAXIMA = ("max", "amax", "logsumexp", "maximum", "cummax")
BOUNDED = _words("clamp clamp_max clamp_ log_softmax logsigmoid tanh sigmoid minimum softmax")
FFT = frozenset(
    f"fft.{kind}" for kind in _words("fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft ihfft")
)
# uses of a gradient that the loss scale changes: all but multiplying by a number
NONLINEAR = _words("""
    pow square norm linalg.vector_norm abs std var max min amax amin item tolist numpy clamp clamp_ clamp_min clamp_max clip_ sum
    mean median sqrt sign sign_ histc log exp""")
RUNNING = _words("add sub mul div lerp add_ sub_ mul_ div_ lerp_ getitem view phi moved cuda")
CREATED = ("zeros", "ones", "empty", "full", "tensor")
SAME_VALUES = SHAPE | {"getitem", "view"}
