"""Names that torch and the libraries around it give to classes, methods and devices; operations are in `core/ops.py`."""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


IN_FILE = "(in a settings file)"  # the argument of a framework that its settings file gives
KNOWN_LIBRARIES = _words("torch lightning pytorch_lightning accelerate deepspeed transformers apex")
GRAD_SCALERS = _words("GradScaler ShardedGradScaler")
OPTIMIZERS = _words("""
    Optimizer Adam AdamW SGD RMSprop Adagrad Adadelta Adamax NAdam RAdam SparseAdam LBFGS Rprop ASGD Muon Adafactor Lion LAMB
    Lamb LARS FusedAdam FusedLAMB FusedSGD FusedAdagrad FusedNovoGrad Adam8bit AdamW8bit PagedAdamW PagedAdamW8bit
    PagedAdamW32bit Lion8bit SGD8bit DeepSpeedCPUAdam OnebitAdam AdamWScheduleFree SGDScheduleFree AdamWFp8 AdamW4bit""")
# those that divide a gradient by its own size: a constant factor of it changes nothing
ADAPTIVE = _words(
    "Adam AdamW Adamax NAdam RAdam Adagrad RMSprop Rprop Lion Adafactor LAMB Lamb FusedAdam FusedLAMB Adam8bit AdamW8bit"
)
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
