"""transformers' TrainingArguments and PEFT's LoRA keys, which TRL, LLaMA-Factory and many scripts share."""

from __future__ import annotations

from typing import get_args

from whet.convert.configs import deepspeed
from whet.convert.configs.draft import Draft, is_off
from whet.convert.configs.rules import (
    put_intervals,
    put_length,
    put_memory,
    put_optimizer,
    put_precision,
    put_schedule,
    put_sharding,
)
from whet.convert.configs.table import Rows, by_rule, copied, no_equivalent, not_needed, same_as
from whet.training.config import Tracker

SPEED = "affects only speed or memory; whet chooses"
LOGS = "whet writes every step to metrics.jsonl and TensorBoard"
HUB = "whet exports into the run folder and uploads nothing; `hf upload` does"

ROWS: Rows = {
    **by_rule(
        "per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs learning_rate "
        "lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args adam_beta1 adam_beta2 "
        "adam_epsilon weight_decay max_grad_norm bf16 fp16 gradient_checkpointing torch_compile save_strategy "
        "save_steps save_total_limit eval_strategy eval_steps eval_on_start load_best_model_at_end deepspeed fsdp "
        "fsdp_config report_to output_dir resume_from_checkpoint save_only_model use_cpu use_mps_device"
    ),
    **same_as(
        evaluation_strategy="eval_strategy", per_gpu_train_batch_size="per_device_train_batch_size", no_cuda="use_cpu",
    ),
    **copied("integer", seed="run.seed"),
    **copied("text", run_name="run.name"),
    **copied("number", label_smoothing_factor="train.label_smoothing"),
    **copied("flag", full_determinism="train.deterministic"),
    **no_equivalent("data order and initial weights share run.seed", "data_seed"),
    **no_equivalent("noise on embeddings", "neftune_noise_alpha"),
    **no_equivalent("GaLore, APOLLO and LISA project or freeze gradients", "optim_target_modules"),
    **no_equivalent("samples are drawn in random order, packed by length", "group_by_length train_sampling_strategy"),
    **no_equivalent("set train.micro_rows; memory does not change the result", "auto_find_batch_size"),
    **no_equivalent("the loss is always divided by all supervised tokens of a step", "average_tokens_across_devices"),
    **no_equivalent(HUB, "push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push "
                    "hub_revision push_to_hub_model_id push_to_hub_organization push_to_hub_token"),
    **no_equivalent("checkpoints/best follows eval.best, which is val_loss unless set", "metric_for_best_model "
                    "greater_is_better"),
    **no_equivalent("generated answers are scored by eval.tasks", "predict_with_generate generation_max_length "
                    "generation_num_beams generation_config do_predict"),
    **not_needed(LOGS, "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level "
                 "log_level_replica log_on_each_node disable_tqdm include_num_input_tokens_seen project "
                 "include_tokens_per_second trackio_space_id trackio_bucket_id trackio_static_space_id plot_loss"),
    **not_needed(SPEED, "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
                 "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
                 "per_device_eval_batch_size eval_accumulation_steps tf32 use_liger_kernel liger_kernel_config "
                 "use_cache torch_empty_cache_steps torch_compile_backend torch_compile_mode "
                 "gradient_checkpointing_kwargs ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
                 "ddp_static_graph ddp_backend ddp_timeout accelerator_config parallelism_config bf16_full_eval "
                 "fp16_full_eval local_rank skip_memory_metrics debug jit_mode_eval "
                 "use_ipex eval_do_concat_batches eval_use_gather_object batch_eval_metrics per_gpu_eval_batch_size "
                 "fp16_opt_level fp16_backend half_precision_backend torchdynamo tpu_num_cores tpu_metrics_debug "
                 "past_index mp_parameters sortish_sampler low_cpu_mem_usage use_fast_tokenizer"),
    **not_needed("whet always does this", "remove_unused_columns label_names length_column_name prediction_loss_only "
                 "save_safetensors save_on_each_node dataloader_drop_last do_train do_eval include_for_metrics "
                 "include_inputs_for_metrics eval_delay ignore_data_skip restore_callback_states_from_checkpoint "
                 "overwrite_output_dir enable_jit_checkpoint ray_scope use_legacy_prediction_loop"),
    **no_equivalent("FSDP module globs: whet shards every layer", "fsdp_transformer_layer_cls_to_wrap "
                    "fsdp_min_num_params"),
}  # fmt: skip

LORA_ROWS: Rows = by_rule(
    "use_peft lora_r lora_alpha lora_dropout lora_target_modules lora_modules_to_save use_rslora use_dora load_in_4bit "
    "load_in_8bit bnb_4bit_quant_type"
)

DEFAULTS = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": -1, "num_train_epochs": 3.0,
    "learning_rate": 5e-5, "lr_scheduler_type": "linear", "warmup_steps": 0, "optim": "adamw_torch_fused",
    "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
    "bf16": False, "fp16": False, "gradient_checkpointing": False, "save_strategy": "steps", "save_steps": 500,
    "eval_strategy": "no", "eval_on_start": False, "seed": 42,
}  # fmt: skip
"""Of transformers 5.22."""


def put_training_arguments(draft: Draft) -> None:
    """Everything that TrainingArguments decides but the unit of the batch, which depends on packing."""
    put_length(draft)
    put_optimizer(draft)
    put_schedule(draft)
    put_precision(draft)
    put_memory(draft)
    put_intervals(draft)
    put_output(draft)
    if draft.has("fsdp") and not is_off(draft.raw("fsdp")):
        words = str(draft.raw("fsdp"))
        put_sharding(draft, "fsdp", "weights" if "offload" in words else "")
    if draft.has("fsdp_config"):
        draft.note("no equivalent", "fsdp_config", "FSDP module globs and wrapping: whet shards every layer by itself")


def put_output(draft: Draft) -> None:
    """The run folder, trackers, what is resumed."""
    if draft.has("output_dir"):
        draft.put("run.dir", draft.text("output_dir"), "output_dir")
    trackers = [name for name in draft.texts("report_to") if name not in ("none", "all")]
    known = [name for name in trackers if name in get_args(Tracker)]
    if known and known != ["tensorboard"]:  # which is the default
        draft.put("track", known, "report_to")
    if others := sorted(set(trackers) - set(known)):
        draft.note("no equivalent", "report_to", f"{', '.join(others)}: whet has {', '.join(get_args(Tracker))}")
    if draft.has("resume_from_checkpoint") and not is_off(draft.raw("resume_from_checkpoint")):
        draft.note(
            "no equivalent", "resume_from_checkpoint",
            "whet resumes its own runs (`whet train --resume`); weights of other programs go into model.path",
        )  # fmt: skip
    for key, device in (("use_mps_device", "mps"), ("use_cpu", "cpu")):
        if draft.flag(key):
            draft.put("run.device", device, key)
    if draft.flag("save_only_model"):
        draft.put("checkpoint.optimizer", "newest", "save_only_model", why="the newest two can still be resumed")


def put_deepspeed(draft: Draft) -> None:
    """A DeepSpeed configuration beside these arguments; `auto` in it means the value of the arguments."""
    if draft.has("deepspeed") and not is_off(draft.raw("deepspeed")):
        deepspeed.include(draft, "deepspeed")
