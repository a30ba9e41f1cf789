"""MindSpeed-LLM's YAML for FSDP2: groups model, data, parallel, training, optimization."""

from __future__ import annotations

import math

from whet.convert.configs.draft import Draft
from whet.convert.configs.huggingface import SPEED
from whet.convert.configs.llamafactory import DATA_ROWS, TOKEN_ROWS, put_mask, put_rows, put_sources, put_tokens
from whet.convert.configs.rules import fraction, put_intervals, put_length, put_optimizer, put_schedule
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as

_MODEL: Rows = {
    **TOKEN_ROWS,
    **copied("text", model_name_or_path="model.path", tokenizer_name_or_path="model.tokenizer",
             model_revision="model.revision"),
    **copied("flag", trust_remote_code="model.trust_remote_code"),
    **no_equivalent("random weights: model.path: random:FOLDER", "train_from_scratch"),
    **no_equivalent("MXFP8: train.precision: fp8 is torchao's", "quant_recipe_name quant_apply_modules "
                    "quant_ignored_modules quant_converters"),
    **not_needed(SPEED, "model_id init_model_with_meta_device enable_fsdp_low_precision_all_gather "
                 "fsdp_low_precision_all_gather_mode"),
}  # fmt: skip
_DATA: Rows = {
    **DATA_ROWS,
    **no_equivalent("Megatron's data loader; whet reads .bin files as sources", "data_manager_type split append_eod "
                    "dataloader_type reset_attention_mask create_attention_mask_in_dataloader"),
    **not_needed(SPEED, "no_shared_storage"),
}  # fmt: skip
_PARALLEL: Rows = {
    **by_rule("fsdp_size param_dtype recompute cp_size cp_type"),
    **copied("integer", tp_size="parallel.tensor"),
    **no_equivalent("parallel.expert, a separate axis next to parallel.shard", "ep_size ep_fsdp_size"),
    **no_equivalent("FSDP module globs: whet shards and recomputes every layer", "fsdp_modules ignored_modules "
                    "hook_modules recompute_modules tp_colwise tp_rowwise ep_modules ep_fsdp_modules chunk_mbs_modules "
                    "shard_placement_fn efsdp_shard_placement_fn"),
    **not_needed(SPEED, "reshard_after_forward fsdp_implementation ep_dispatcher reduce_dtype num_to_forward_prefetch "
                 "num_to_backward_prefetch enable_chunk_batch chunk_mbs chunk_mbs_batch_dim chunk_mbs_arg_indexs "
                 "chunk_mbs_kwarg_names"),
}  # fmt: skip
_TRAINING: Rows = {
    **by_rule("weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm lr_scheduler_type warmup_ratio min_lr "
              "num_train_epochs max_steps gradient_accumulation_steps per_device_train_batch_size save_steps "
              "save_total_limit save_only_model stage save_epochs resume_from_checkpoint profile profile_step_start "
              "profile_step_end profile_ranks profile_with_stack profile_with_memory profile_record_shapes"),
    **same_as(lr="learning_rate", optimizer="optim"),
    **copied("integer", seed="run.seed"),
    **copied("text", output_dir="run.dir"),
    **copied("flag", deterministic="train.deterministic"),
    **copied("number", router_aux_loss_coef="train.router_aux_loss"),
    **no_equivalent("auxiliary losses", "indexer_loss_coeff mtp_loss_scaling_factor"),
    **no_equivalent("whet shuffles; the order follows run.seed", "disable_shuffling"),
    **not_needed("the loss is always divided by all supervised tokens of a step", "calculate_per_token_loss"),
    **not_needed("whet logs every step", "logging_steps log_throughput log_cpu_memory"),
    **not_needed(SPEED, "dataloader_num_workers dataloader_prefetch_factor dataloader_pin_memory "
                 "dataloader_persistent_workers dataloader_drop_last save_async profile_level profile_export_type "
                 "profile_data_simplification profile_with_cpu profile_save_path"),
    **not_needed("whet exports at the end of every run (export.at_end)", "save_hf_weights"),
}  # fmt: skip
_OPTIMIZATION: Rows = not_needed(
    SPEED,
    "use_fused_rmsnorm moe_grouped_gemm use_fused_rotary_pos_emb use_flash_attn use_sparse_flash_attn "
    "use_fused_lightning_indexer use_fused_lightning_indexer_loss use_ascend_mhc use_triton_swiglu_limit pre_tokens "
    "next_tokens use_triton_gdn use_flash_gdn gdn_chunk_size chunk_loss_size use_triton_rmsnormgated fix_router",
)
_INFERENCE: Rows = not_needed("settings of chatting", "infer_backend max_new_tokens do_sample")

_GROUPS = {"model": _MODEL, "data": _DATA, "parallel": _PARALLEL, "training": _TRAINING, "optimization": _OPTIMIZATION,
           "inference": _INFERENCE}  # fmt: skip


def put_training(draft: Draft) -> None:
    """Length, optimizer, schedule, checkpoints. The schedule's lowest rate is absolute, and for cosine alone."""
    epochs = draft.number("num_train_epochs")
    put_length(draft)
    if epochs is not None and epochs != int(epochs) and "train.epochs" in draft.settings:
        draft.note(
            "different", "num_train_epochs", f"MindSpeed-LLM trains {int(epochs)} whole epochs; {epochs} is written"
        )
    elif "train.steps" in draft.settings:
        draft.note("different", "max_steps", "MindSpeed-LLM ends after num_train_epochs even if max_steps is greater; "
                   "whet takes all steps")  # fmt: skip
    put_optimizer(draft)
    put_schedule(draft, to_steps=math.floor, constant_warms_up=True)
    rate, lowest = draft.number("learning_rate"), draft.number("min_lr")
    if draft.settings["train.schedule.name"].value == "cosine" and rate and lowest is not None:
        draft.put(
            "train.schedule.min_frac", fraction(lowest / rate), "min_lr", "learning_rate", why=f"{lowest} ÷ {rate}"
        )
    put_intervals(draft)
    if (epochs_between := draft.number("save_epochs")) and draft.has("save_epochs"):
        draft.put("checkpoint.epochs", float(epochs_between), "save_epochs")
    if draft.flag("save_only_model"):
        draft.put("checkpoint.optimizer", "newest", "save_only_model")
    if draft.has("resume_from_checkpoint"):
        draft.note("no equivalent", "resume_from_checkpoint", "whet resumes its own runs; for weights see `whet import "
                   "checkpoint mindspeed`")  # fmt: skip
    _put_profile(draft)


def _put_profile(draft: Draft) -> None:
    if not draft.flag("profile"):
        return
    start, end = draft.integer("profile_step_start") or 0, draft.integer("profile_step_end")
    last = end if end is not None and end > 0 else start + 1
    draft.put("profile.steps", [start + 1, max(last, start + 1)], "profile", "profile_step_start", "profile_step_end",
              why="whet counts from 1 and includes the last")  # fmt: skip
    for key, to in (
        ("profile_with_stack", "stack"),
        ("profile_with_memory", "memory"),
        ("profile_record_shapes", "shapes"),
    ):
        if draft.flag(key):
            draft.put(f"profile.{to}", True, key)
    ranks = draft.raw("profile_ranks")
    if isinstance(ranks, list) and ranks and all(isinstance(rank, int) and rank >= 0 for rank in ranks):
        draft.put("profile.ranks", ranks, "profile_ranks")


def put_parallel(draft: Draft) -> None:
    """fsdp_size processes hold the weights together; the dtype of their parameters is that of the computation."""
    shard = draft.integer("fsdp_size") or 1
    if shard > 1:
        draft.put("parallel.shard", shard, "fsdp_size")
        draft.world = shard
    else:
        draft.use("fsdp_size")
    if (context := draft.integer("cp_size") or 1) > 1:
        draft.put("parallel.context", context, "cp_size")
        if draft.text("cp_type") not in (None, "ulysses"):
            draft.note("different", "cp_type", "whet's context parallelism is Ulysses, with the same result")
    draft.put("parallel.recompute", "full" if draft.flag("recompute") else "none", "recompute")
    dtype = draft.text("param_dtype") or "bf16"
    if dtype not in ("bf16", "fp16", "fp32"):
        raise draft.fail("param_dtype", "is not bf16, fp16 or fp32")
    draft.put("train.precision", dtype, "param_dtype")


KIND = Kind(
    "mindspeed",
    "MindSpeed-LLM (2026-08)",
    {key: row for rows in _GROUPS.values() for key, row in rows.items()},
    (put_parallel, put_training, put_mask, put_rows, put_sources, put_tokens),
    defaults={
        "optim": "adamw", "learning_rate": 1e-5, "weight_decay": 0.01, "adam_beta1": 0.9, "adam_beta2": 0.95,
        "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "lr_scheduler_type": "cosine", "warmup_ratio": 0.03, "min_lr": 1e-6,
        "num_train_epochs": 3.0, "max_steps": -1, "gradient_accumulation_steps": 1, "per_device_train_batch_size": 8,
        "save_steps": 500, "save_total_limit": 3, "seed": 42, "stage": "sft", "max_length": 2048, "param_dtype": "bf16",
        "train_on_prompt": False, "mask_history": False, "packing": False, "recompute": False, "deterministic": True,
        "dataset_dir": "./configs/fsdp2/data",
    },
    groups=_GROUPS,
    command="train_fsdp2",
)  # fmt: skip
