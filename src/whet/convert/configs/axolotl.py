"""Axolotl's YAML."""

from __future__ import annotations

import math
from typing import Any

from whet.convert.configs.draft import Draft, is_off, without_secrets
from whet.convert.configs.huggingface import DEFAULTS, HUB, LOGS, SPEED, put_deepspeed
from whet.convert.configs.rules import (
    fsdp_options,
    put_adapter,
    put_batch,
    put_intervals,
    put_length,
    put_memory,
    put_optimizer,
    put_precision,
    put_schedule,
    put_sharding,
    put_targets,
    put_validation_size,
    total_steps,
)
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as
from whet.convert.configs.trl import dataset_path
from whet.core.errors import WhetError
from whet.core.yaml import Node

_ROWS: Rows = {
    **by_rule(
        "gradient_accumulation_steps batch_size max_steps learning_rate lr_scheduler_kwargs warmup_steps warmup_ratio "
        "cosine_min_lr_ratio optim_args adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm bf16 fp16 fp8 "
        "bfloat16 float16 gradient_checkpointing activation_offloading torch_compile save_strategy save_steps "
        "saves_per_epoch save_total_limit eval_strategy eval_steps evals_per_epoch load_best_model_at_end "
        "save_only_model deepspeed fsdp fsdp_config adapter lora_r lora_alpha lora_dropout lora_target_modules "
        "lora_target_linear lora_modules_to_save lora_rank_pattern lora_alpha_pattern load_in_4bit load_in_8bit "
        "sample_packing excess_length_strategy train_on_inputs datasets test_datasets val_set_size chat_template "
        "chat_template_jinja pretraining_dataset rl reward_model process_reward_model special_tokens tokens "
        "resume_from_checkpoint dp_shard_size dp_replicate_size context_parallel_size"
    ),
    **same_as(
        micro_batch_size="per_device_train_batch_size", num_epochs="num_train_epochs", lr_scheduler="lr_scheduler_type",
        optimizer="optim", sequence_len="max_length", evaluation_strategy="eval_strategy", peft_use_dora="use_dora",
        peft_use_rslora="use_rslora", sequence_parallel_degree="context_parallel_size",
    ),
    **copied("text", base_model="model.path", revision_of_model="model.revision", tokenizer_config="model.tokenizer",
             output_dir="run.dir", wandb_name="run.name", wandb_project="run.project"),
    **copied("integer", seed="run.seed", tensor_parallel_size="parallel.tensor"),
    **copied("flag", trust_remote_code="model.trust_remote_code", dataset_exact_deduplication="data.deduplicate"),
    **copied("number", embedding_lr="train.optimizer.embedding_lr"),
    **no_equivalent("streaming: whet prepares the data before step 1", "streaming streaming_multipack_buffer_size "
                    "pretrain_multipack_buffer_size preprocess_iterable"),
    **no_equivalent("learning rates of other groups, and schedules that whet does not have",
                    "embedding_lr_scale lr_groups lr_div_factor lr_quadratic_warmup cosine_constant_lr_ratio "
                    "loraplus_lr_ratio loraplus_lr_embedding jagged_restart_steps jagged_restart_warmup_steps "
                    "jagged_restart_anneal_steps"),
    **no_equivalent("a method other than LoRA, DoRA and rsLoRA", "relora relora_prune_ratio relora_prune_method peft "
                    "peft_init_lora_weights peft_layer_replication lisa_n_layers lisa_step_interval "
                    "lisa_layers_attribute gptq model_quantization_config model_quantization_config_kwargs "
                    "use_onebitllms optim_target_modules unfrozen_parameters freeze_mm_modules"),
    **no_equivalent("adapts single layers or parameters; adapter.targets takes a regular expression",
                    "peft_layers_to_transform peft_layers_pattern lora_target_parameters lora_fan_in_fan_out "
                    "peft_trainable_token_indices peft_ensure_weight_tying quantize_moe_experts"),
    **no_equivalent("continues an adapter; merge it first (`whet merge`) and give the result as model.path",
                    "lora_model_dir"),
    **no_equivalent("noise on embeddings", "neftune_noise_alpha noisy_embedding_alpha"),
    **no_equivalent("a loss other than the log-likelihood", "use_eaft eaft_alpha eaft_k orpo_alpha simpo_gamma "
                    "cpo_alpha kto_desirable_weight kto_undesirable_weight rl_beta dpo_beta dpo_use_weighting "
                    "dpo_label_smoothing dpo_loss_type dpo_loss_weights precompute_ref_log_probs dpo_use_liger_kernel "
                    "dpo_padding_free trl vllm ebft center_rewards_coefficient num_labels"),
    **no_equivalent("stops a run by a rule; train.on_nonfinite and train.on_spike guard it", "loss_watchdog_threshold "
                    "loss_watchdog_patience"),
    **no_equivalent("early stopping: set eval.patience and eval.every", "early_stopping_patience"),
    **no_equivalent("quantization while training or after", "qat quantization"),
    **no_equivalent("the model's own positions and attention are used", "rope_scaling overrides_of_model_config "
                    "overrides_of_model_kwargs use_pose pose_split_on_token_ids pose_max_context_len pose_num_chunks "
                    "scaling_softmax scaling_softmax_factor scaling_softmax_bias s2_attention"),
    **no_equivalent("plugins of Axolotl", "plugins trainer_cls diffusion llmcompressor eta_min use_swanlab "
                    "swanlab_project"),
    **no_equivalent("parallel.expert, a separate axis next to parallel.shard", "expert_parallel_size"),
    **no_equivalent("weights quantized by GPTQ", "gptq_groupsize gptq_model_v1 gptq_disable_exllama"),
    **no_equivalent("another configuration of the model", "model_config"),
    **not_needed(SPEED, "use_scattermoe use_sonicmoe liger_rms_norm_gated max_packed_sequence_len relora_cpu_offload"),
    **no_equivalent("changes the weights before training", "reinit_weights mean_resizing_embeddings shrink_embeddings "
                    "resize_token_embeddings_to_32x fix_untrained_tokens added_tokens_overrides"),
    **no_equivalent("another way to select or order records; data.sources has start, stop, step and where",
                    "dataset_shard_num dataset_shard_idx min_sample_len max_prompt_len curriculum_sampling "
                    "sample_packing_sequentially group_by_length shuffle_before_merging_datasets"),
    **no_equivalent("the template's own", "default_system_message eot_tokens chat_template_kwargs"),
    **no_equivalent("generated answers are scored by eval.tasks", "do_causal_lm_eval eval_causal_lm_metrics "
                    "do_bench_eval bench_dataset bench_split eval_table_size eval_max_new_tokens generate_samples "
                    "num_generation_samples generation_max_new_tokens generation_temperature generation_top_p "
                    "generation_top_k generation_prompt_ratio generation_do_sample metric_for_best_model "
                    "greater_is_better"),
    **no_equivalent("name trackers in `track`; their own environment variables (WANDB_*) do the rest",
                    "use_mlflow mlflow_tracking_uri mlflow_experiment_name "
                    "mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace "
                    "comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_wandb "
                    "wandb_entity wandb_watch wandb_log_model wandb_run_id wandb_mode use_trackio "
                    "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host "
                    "otel_metrics_port"),
    **no_equivalent(HUB, "hub_model_id hub_strategy hub_revision push_dataset_to_hub"),
    **no_equivalent("offload to disk or of layers; whet has parallel.offload", "layer_offloading"),
    **no_equivalent("images and sound", "processor_type processor_kwargs image_size image_resize_algorithm "
                    "role_boundaries"),
    **no_equivalent("Ray", "use_ray ray_run_name ray_num_workers resources_per_worker"),
    **not_needed(LOGS, "logging_steps use_tensorboard include_tokens_per_second include_tkps profiler_steps "
                 "profiler_steps_start"),
    **not_needed(SPEED, "tf32 float32 flash_attention sdp_attention xformers_attention flex_attention eager_attention "
                 "sage_attention attn_implementation flex_attn_compile_kwargs flash_attn_cross_entropy "
                 "flash_attn_fuse_mlp flash_attn_rms_norm flash_optimum gemma4_hybrid_attn_impl large_head_attention "
                 "flash_attn_d512 sdpa_varlen fused_attn_kernel experts_implementation lora_mlp_kernel lora_qkv_kernel "
                 "lora_o_kernel lora_embedding_kernel chunked_cross_entropy chunked_cross_entropy_num_chunks tiled_mlp "
                 "tiled_mlp_num_shards tiled_mlp_use_original_mlp llama4_linearized_experts deepcompile "
                 "gradient_checkpointing_kwargs selective_checkpointing torch_compile_backend torch_compile_mode "
                 "torch_compile_options dataset_processes dataset_num_proc dataset_keep_in_memory "
                 "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor accelerator_config "
                 "low_cpu_mem_usage max_memory gpu_memory_limit device device_map world_size local_rank ddp "
                 "ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters gc_steps "
                 "gc_collect_steps torch_empty_cache_steps eval_batch_size auto_find_batch_size eval_sample_packing "
                 "pad_to_sequence_len pad_to_multiple_of sample_packing_group_size sample_packing_bin_size "
                 "sample_packing_mp_start_method sample_packing_eff_est multipack_real_batches batch_flattening "
                 "pretrain_multipack_attn pretraining_sample_concatenation heads_k_stride ring_attn_func "
                 "fp8_enable_fsdp_float8_all_gather fp32_norms fp32_norm_classes embeddings_skip_upcast fsdp_version "
                 "fsdp_final_state_dict_type lora_on_cpu qlora_sharded_model_loading bnb_config_kwargs "
                 "peft_autocast_adapter_dtype use_kernels experimental_skip_move_to_device eval_sequence_len "
                 "merge_lora merge_method total_num_tokens total_supervised_tokens liger_rope liger_rms_norm "
                 "liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy liger_cross_entropy "
                 "cut_cross_entropy unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o unsloth_cross_entropy_loss "
                 "torchdistx_path"),
    **not_needed("whet always does this, or finds it out by itself", "dataset_prepared_path strict "
                 "shuffle_merged_datasets skip_prepare_dataset num_dataset_shards_to_save dataloader_drop_last "
                 "remove_unused_columns hf_use_auth_token save_safetensors save_first_step "
                 "auto_resume_from_checkpoints dynamic_checkpoint "
                 "base_model_config cls_model_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
                 "tokenizer_type tokenizer_save_jinja_files type_of_model model_type is_falcon_derived_model "
                 "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model is_preprocess "
                 "axolotl_config_path gradio_title gradio_share gradio_server_name gradio_server_port "
                 "gradio_max_new_tokens gradio_temperature debug"),
}  # fmt: skip


def refuse_other_training(draft: Draft) -> None:
    """Preference and reward training is another thing than fine-tuning on conversations."""
    for key in ("rl", "reward_model", "process_reward_model"):
        if draft.has(key) and not is_off(draft.raw(key)):
            raise draft.fail(
                key, "is not supervised fine-tuning, and whet trains only on answers. Nothing was imported"
            )


def put_parallel(draft: Draft) -> None:
    """Axolotl's own mesh gives the number of processes where it is complete."""
    shard, replicate = draft.integer("dp_shard_size"), draft.integer("dp_replicate_size")
    if shard is not None:
        draft.put("parallel.shard", shard, "dp_shard_size")
    if replicate is not None:
        draft.put("parallel.replicate", replicate, "dp_replicate_size")
    if (context := draft.integer("context_parallel_size")) is not None and context > 1:
        draft.put("parallel.context", context, "context_parallel_size")
    if shard or replicate:
        draft.world = (shard or 1) * (replicate or 1)
    if draft.has("fsdp_config") or (draft.has("fsdp") and not is_off(draft.raw("fsdp"))):
        key = "fsdp_config" if draft.has("fsdp_config") else "fsdp"
        options = fsdp_options(draft)
        offload = not is_off(options.get("offload_params"))
        if shard is None:
            put_sharding(draft, key, "weights" if offload or "offload" in str(draft.raw("fsdp")) else "")
        wraps = [name for name in options if "wrap" in name]
        if wraps:
            draft.note("no equivalent", key, f"FSDP module globs ({', '.join(wraps)}): whet shards every layer")
        draft.use("fsdp", "fsdp_config")


def put_training(draft: Draft) -> None:
    """Length, batch, optimizer, schedule, precision."""
    put_length(draft)
    put_optimizer(draft)
    put_schedule(draft, to_steps=math.floor)
    if not draft.has("warmup_steps", "warmup_ratio"):
        steps = total_steps(draft)
        value = 0.03 if steps is None else min(int(0.03 * steps), 100)
        draft.put("train.schedule.warmup", value, "max_steps", why="3 % of the run, at most 100 steps")
    if (lowest := draft.number("cosine_min_lr_ratio")) is not None:
        draft.put("train.schedule.min_frac", lowest, "cosine_min_lr_ratio")
    put_precision(draft)
    for key, precision in (("bfloat16", "bf16"), ("float16", "fp16")):
        if draft.flag(key) and not draft.has("bf16", "fp16"):
            draft.put("train.precision", precision, key)
    put_memory(draft)
    if not draft.has("save_steps", "save_strategy", "saves_per_epoch"):
        draft.put("checkpoint.epochs", 1.0, "save_strategy", why="once an epoch")
    put_intervals(draft)
    if per_epoch := draft.number("saves_per_epoch"):
        draft.put("checkpoint.epochs", 1 / per_epoch, "saves_per_epoch")
    if draft.number("evals_per_epoch"):
        draft.note("no equivalent", "evals_per_epoch", "eval.every counts steps: set it to steps of an epoch ÷ "
                   f"{draft.raw('evals_per_epoch')}")  # fmt: skip
    if draft.has("resume_from_checkpoint"):
        draft.note("no equivalent", "resume_from_checkpoint", "whet resumes its own runs (`whet train --resume`)")
    if draft.flag("save_only_model"):
        draft.put("checkpoint.optimizer", "newest", "save_only_model")


def put_rows(draft: Draft) -> None:
    """Sequence length, packing and the batch; with sample_packing a batch counts packed rows."""
    packing = draft.flag("sample_packing")
    draft.put("data.max_length", draft.integer("max_length"), "max_length")
    draft.put("data.packing", "best-fit" if packing else "none", "sample_packing")
    excess = str(draft.text("excess_length_strategy") or "drop").lower()
    policies = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    if excess not in policies:
        raise draft.fail("excess_length_strategy", f"is not one of {', '.join(policies)}")
    draft.put("data.too_long", policies[excess], "excess_length_strategy")
    if draft.has("batch_size") and not draft.has("gradient_accumulation_steps"):
        size, micro = draft.integer("batch_size") or 1, draft.integer("per_device_train_batch_size") or 1
        unit = "rows" if packing else "conversations"
        draft.put(f"train.batch.{unit}", size * (draft.world or 1), "batch_size")
        draft.put("train.micro_rows", micro, "per_device_train_batch_size")
        if draft.world is None:
            draft.note("decide", "batch_size", f"is for one GPU: multiply train.batch.{unit} by their number")
    else:
        put_batch(draft, "rows" if packing else "conversations")


def put_adapters(draft: Draft) -> None:
    """adapter: lora or qlora; without it every weight is trained, in bf16 if bf16 is on."""
    adapter = draft.text("adapter")
    if adapter in ("lora", "qlora"):
        put_adapter(draft, "adapter")
        if draft.flag("lora_target_linear"):
            draft.put("adapter.targets", "all-linear", "lora_target_linear")
        else:
            put_targets(draft)
        for key, to in (("lora_r", "adapter.rank"), ("lora_alpha", "adapter.alpha")):
            if not draft.has(key):
                draft.settings.pop(to)
                draft.note("decide", key, f"is not given; {to} is whet's default")
    elif adapter:
        draft.note(
            "no equivalent", "adapter", "whet has LoRA, rsLoRA and DoRA; without an adapter every weight is trained"
        )
    elif draft.settings["train.precision"].value == "bf16":
        draft.put("model.dtype", "bf16", "bf16", why="Axolotl loads the weights in bf16")
        draft.note("different", "bf16", "Axolotl trains weights in bf16, without an fp32 copy; whet's model.dtype: "
                   "bf16 adds stochastic rounding. Remove it to train in fp32")  # fmt: skip


# Data and what is learned of it

_FORMATS = {"chat_template": "messages", "sharegpt": "sharegpt", "alpaca": "alpaca", "alpaca_chat": "alpaca",
            "completion": "text"}  # fmt: skip
_SOURCE_KEYS = {"path", "name", "split", "type", "data_files", "ds_type", "field", "field_messages", "roles_to_train",
                "train_on_eos", "train_on_eot"}  # fmt: skip
_USUAL = {
    "message_field_role": ("role", "from"), "message_field_content": ("content", "value"),
    "chat_template": ("tokenizer_default",),
    "message_property_mappings": ({"role": "role", "content": "content"}, {"role": "from", "content": "value"}),
}  # fmt: skip
"""Values of a dataset's keys that mean what whet does by itself."""


def put_data(draft: Draft) -> None:
    """datasets and test_datasets; a dataset's type is its format."""
    learned: set[str] = set()
    for key, to in (("datasets", "data.sources"), ("test_datasets", "data.validation.sources")):
        if draft.has(key):
            for number, node in enumerate(_items(draft, key)):
                learned.add(_put_source(draft, key, f"{to}.{number}", node))
    if draft.has("pretraining_dataset"):
        given = draft.raw("pretraining_dataset")
        first = given[0] if isinstance(given, list) and given else given
        path = first.get("path") if isinstance(first, dict) else first
        draft.put("data.sources.0.path", dataset_path(draft, str(path)), "pretraining_dataset")
        draft.put("data.sources.0.format", "text", "pretraining_dataset")
        draft.note("different", "pretraining_dataset", "Axolotl streams it; whet prepares it before step 1")
        learned.add("all")
    put_validation_size(draft, "val_set_size")
    _put_mask(draft, learned)
    template = draft.text("chat_template")
    if draft.has("chat_template_jinja"):
        _put_template(draft, "chat_template_jinja", draft.text("chat_template_jinja") or "")
    elif template not in (None, "tokenizer_default"):
        draft.note("decide", "chat_template", "a template of Axolotl's; whet uses the tokenizer's own. Give another as "
                   "a .jinja file in data.template")  # fmt: skip
    if isinstance(draft.raw("tokens"), dict):  # the old name of special_tokens
        draft.note("no equivalent", "tokens", "the tokenizer's own are used; model.add_tokens adds new ones")
    elif tokens := draft.texts("tokens"):
        draft.put("model.add_tokens", tokens, "tokens")
    if draft.has("special_tokens"):
        draft.note("no equivalent", "special_tokens", "the tokenizer's own are used; model.add_tokens adds new ones")


def _put_template(draft: Draft, key: str, text: str) -> None:
    if "\n" in text or "{" in text:
        draft.note("decide", key, "a template in the file itself: save it as a .jinja file and set data.template")
    else:
        draft.put("data.template", text, key)


def _items(draft: Draft, key: str) -> list[Node]:
    value = draft.entries[key].node.value
    if not isinstance(value, list) or not all(isinstance(each.value, dict) for each in value):
        raise draft.fail(key, "is not a list of datasets with a path each")
    return value


def _put_source(draft: Draft, key: str, to: str, node: Node) -> str:
    """Write one source; the result is what is learned of it: assistant, all, or other roles by name."""
    given: dict[str, Any] = node.plain()
    path = given.get("data_files") or given.get("path")
    if isinstance(path, list):
        if len(path) > 1:
            draft.note("decide", key, f"data_files {path!r}: give each file its own source")
        path = path[0] if path else None
    if path is None:
        raise WhetError(f"{node.place}: {key}: a dataset without path: {given!r}")
    draft.put(f"{to}.path", dataset_path(draft, str(path)), key)
    if draft.settings[f"{to}.path"].value != path:
        for name, target in (("name", "subset"), ("split", "split")):
            if given.get(name):
                draft.put(f"{to}.{target}", str(given[name]), key)
    _put_format(draft, key, to, given)
    _note_source(draft, key, given)
    if str(given.get("type")).startswith("completion"):
        return "all"
    roles = given.get("roles_to_train")
    if roles is not None and not isinstance(roles, list):
        raise WhetError(f"{node.place}: {key}: roles_to_train: {roles!r} is not a list")
    named = {str(role) for role in roles or ["assistant"]}
    if named <= {"assistant", "gpt", "model"}:
        return "nothing" if roles == [] else "assistant"
    return "all" if {"user", "human"} & named else ", ".join(sorted(named))


_PROMPT_FIELDS = {"field_instruction": "instruction", "field_input": "input", "field_output": "output",
                  "field_system": "system"}  # fmt: skip


def _put_format(draft: Draft, key: str, to: str, given: dict[str, Any]) -> None:
    """The format of a source and the names of its fields."""
    kind = given.get("type")
    base = str(kind).split(".")[0].split(":")[0]
    if isinstance(kind, dict):
        fields = {name: str(kind[field]) for field, name in _PROMPT_FIELDS.items() if kind.get(field)}
        draft.put(f"{to}.format", "alpaca", key)
        if fields:
            draft.put(f"{to}.fields", fields, key)
    elif given.get("field_messages") or given.get("field"):
        name = "messages" if given.get("field_messages") else "text"
        draft.put(f"{to}.fields", {name: str(given.get("field_messages") or given.get("field"))}, key)
    elif base in _FORMATS:
        draft.put(f"{to}.format", "auto" if base == "chat_template" else _FORMATS[base], key)
    if isinstance(kind, dict) or base in ("alpaca", "alpaca_chat"):
        draft.note("different", key, "Axolotl writes prompts of its own for this type (### Instruction: …); whet uses "
                   "the chat template")  # fmt: skip
    elif kind is not None and base not in _FORMATS:
        draft.note("no equivalent", key, f"type {kind!r}: whet reads messages, sharegpt, alpaca, prompt and "
                   "completion, text; it detects which")  # fmt: skip


def _note_source(draft: Draft, key: str, given: dict[str, Any]) -> None:
    for name in ("train_on_eos", "train_on_eot"):
        if given.get(name) not in (None, "turn"):
            draft.note(
                "different", key, f"{name}: {given[name]}: whet always trains on the end of a turn that it trains on"
            )
    for name in sorted(given.keys() - _SOURCE_KEYS):
        if not is_off(given[name]) and given[name] not in _USUAL.get(name, ()):
            hint = "whet reads train or weight of each message" if name == "message_field_training" else "no place"
            draft.note("no equivalent", key, f"{name}: {without_secrets(given[name], name)!r}: {hint}")


def _put_mask(draft: Draft, learned: set[str]) -> None:
    if draft.flag("train_on_inputs"):
        draft.put("data.train_on", "all", "train_on_inputs")
    elif learned == {"all"}:
        draft.put("data.train_on", "all", "datasets", "pretraining_dataset", why="every token of these datasets")
    elif learned <= {"assistant"}:
        draft.put("data.train_on", "assistant", "train_on_inputs", why="answers and the end of each turn")
    else:
        draft.put("data.train_on", "assistant", "datasets")
        named = "; ".join(sorted(learned - {"assistant"}))
        draft.note("decide", "datasets", f"the datasets train on different roles ({named}); whet has one data.train_on "
                   "for all, and trains on every token of plain text. assistant is written")  # fmt: skip


KIND = Kind(
    "axolotl",
    "Axolotl 0.18",
    _ROWS,
    (refuse_other_training, put_parallel, put_training, put_rows, put_adapters, put_data, put_deepspeed),
    defaults={
        **{key: value for key, value in DEFAULTS.items() if key not in ("eval_on_start", "seed")},
        "per_device_train_batch_size": 1, "num_train_epochs": 1.0, "lr_scheduler_type": "cosine", "bf16": "auto",
        "max_length": 512, "save_total_limit": 4, "save_strategy": "", "save_steps": None, "eval_strategy": "",
        "lora_dropout": 0.0, "train_on_inputs": False, "seed": 42,
    },
)  # fmt: skip
