"""GPT-NeoX's YAML, LUMI's fork included: pretokenized .bin files whose loss mask is a matter of token ids."""

from __future__ import annotations

from pathlib import Path

from whet.convert.configs import deepspeed
from whet.convert.configs.draft import Draft, is_off
from whet.convert.configs.rules import fraction, put_sharding
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as

_SHAPE = "the model's own configuration says it"
_SPEED = "affects only speed or memory; whet chooses"

_SECTIONS = ("zero_optimization.", "fp16.", "bf16.", "optimizer.")
"""Sections that NeoX hands on to DeepSpeed."""

_ROWS: Rows = {
    **{key: row for key, row in deepspeed.ROWS.items() if key.startswith(_SECTIONS)},
    **by_rule(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps world_size global_num_gpus "
        "num_nodes num_gpus model_parallel_size pipe_parallel_size train_iters train_epochs precision weight_decay lr "
        "min_lr lr_decay_style lr_decay_iters lr_decay_fraction warmup gradient_clipping clip_grad zero_stage "
        "pack_impl seq_length train_data_paths valid_data_paths test_data_paths train_data_weights valid_data_weights "
        "data_path split loss_mask_pairs loss_mask_individual loss_mask_alternating_individual eod_mask_loss "
        "train_label_data_paths valid_label_data_paths test_label_data_paths finetune load save no_save_optim "
        "vocab_file checkpoint_factor checkpoint_scale keep_last_n_checkpoints eval_interval checkpoint_activations "
        "train_impl dataset_impl scheduler soft_prompt_tuning checkpoint_in_cpu use_bnb_optimizer"
    ),
    **not_needed("enabled counts", "fp16.fp16 fp16.type bf16.bf16 bf16.loss_scale bf16.loss_scale_window "
                 "bf16.initial_scale_power bf16.hysteresis bf16.min_loss_scale"),
    **same_as(batch_size="train_micro_batch_size_per_gpu"),
    **copied("integer", seed="run.seed", iteration_offset="train.step_offset"),
    **copied("number", z_loss="train.z_loss"),
    **no_equivalent("remote checkpoint storage: whet keeps checkpoints in the run folder", "s3_path s3_chunk_size"),
    **no_equivalent("dropout of the model: whet trains without", "attention_dropout hidden_dropout"),
    **no_equivalent("mixtures of experts keep their own routing", "moe_num_experts moe_top_k moe_loss_coeff "
                    "moe_train_capacity_factor moe_eval_capacity_factor moe_min_capacity moe_token_dropping "
                    "create_moe_param_group moe_use_residual moe_expert_parallel_size moe_type moe_glu moe_lbl_in_fp32 "
                    "moe_jitter_eps enable_expert_tensor_parallelism use_tutel expert_interval"),
    **no_equivalent("muP", "use_mup coord_check save_base_shapes base_shapes_file mup_init_scale mup_attn_temp "
                    "mup_output_temp mup_embedding_mult mup_rp_embedding_mult mup_width_scale"),
    **no_equivalent("the fork's own cool-down; train.schedule has constant, linear, cosine and wsd",
                    "cd_start_iter cd_end_iter start_cd_lr decay_pp"),
    **no_equivalent("preference and reward training", "dpo_fp32 dpo_reference_free dpo_beta kto_fp32 "
                    "kto_desirable_weight kto_undesirable_weight kto_beta train_reward_data_paths "
                    "test_reward_data_paths valid_reward_data_paths pos_train_data_paths neg_train_data_paths "
                    "pos_train_label_data_paths neg_train_label_data_paths pos_valid_data_paths neg_valid_data_paths "
                    "pos_valid_label_data_paths neg_valid_label_data_paths pos_test_data_paths neg_test_data_paths "
                    "pos_test_label_data_paths neg_test_label_data_paths precompute_model_name"),
    **no_equivalent("other ways to weight datasets; data.sources has weight and epochs", "weight_by_num_documents "
                    "weighted_sampler_alpha test_data_weights"),
    **no_equivalent("training on parts of the data or the model", "curriculum_learning curriculum_seqlen "
                    "data_efficiency compression_training sparse_attention"),
    **no_equivalent("name trackers in `track`; their own environment variables (WANDB_*) do the rest",
                    "use_wandb wandb_group wandb_team wandb_project wandb_host "
                    "wandb_init_all_ranks use_comet comet_workspace comet_project comet_experiment_name comet_tags "
                    "comet_others comet_experiment wandb csv_monitor"),
    **no_equivalent("ends a job: whet's run ends, saves and resumes by itself", "exit_interval adlr_autoresume "
                    "adlr_autoresume_interval"),
    **no_equivalent("generation: `whet chat` and `whet eval` have their own options", "text_gen_type temperature top_p "
                    "top_k return_logits maximum_tokens prompt_end sample_input_file sample_output_file num_samples "
                    "recompute eval_results_prefix eval_tasks char_level_ppl"),
    **no_equivalent("steps saved in addition to the interval: checkpoint.keep_every", "extra_save_iters"),
    **not_needed(_SHAPE, "num_layers hidden_size intermediate_size mlp_multiple_of expansion_factor "
                 "num_attention_heads num_kv_heads max_position_embeddings norm layernorm_epsilon rms_norm_epsilon "
                 "scalenorm_epsilon use_qk_layernorm pos_emb rpe_num_buckets rpe_max_distance opt_pos_emb_offset "
                 "no_weight_tying attention_config sparsity_config num_unique_layers param_sharing_style "
                 "make_vocab_size_divisible_by activation rotary_pct rotary_emb_base rotary_save_freqs_buffer yarn "
                 "yarn_beta_slow yarn_beta_fast yarn_factor yarn_attention_factor "
                 "yarn_original_max_position_embeddings init_method init_method_std output_layer_init_method "
                 "gmlp_attn_dim gpt_j_residual gpt_j_tied use_bias_in_norms use_bias_in_attn_linear use_bias_in_mlp "
                 "sliding_window_width padded_vocab_size merge_file mamba_selective_fp32_params mamba_use_bias_in_conv "
                 "mamba_use_bias_in_linears dim_att head_size ffn_dim"),
    **not_needed(_SPEED, "layernorm_fusion rmsnorm_fusion use_flashattn_swiglu rope_fusion bias_gelu_fusion "
                 "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion bias_dropout_fusion "
                 "fp16_lm_cross_entropy apply_query_key_layer_scaling use_cpu_initialization attention_softmax_in_fp32 "
                 "mamba_selective_scan_fusion mamba_causal_conv_fusion mamba_inner_func_fusion "
                 "output_layer_parallelism sequence_parallel pipe_partition_method zero_reduce_scatter "
                 "zero_contiguous_gradients zero_reduce_bucket_size zero_allgather_bucket_size distributed_backend "
                 "local_rank rank lazy_mpu_init checkpoint_num_layers deepspeed_activation_checkpointing "
                 "contiguous_checkpointing synchronize_each_layer profile_backward partition_activations "
                 "fp32_allreduce prescale_gradients gradient_predivide_factor sparse_gradients communication_data_type "
                 "data_types amp activation_checkpointing mmap_warmup data_impl num_workers use_shared_fs hysteresis "
                 "dynamic_loss_scale loss_scale loss_scale_window min_scale elasticity checkpoint comms_logger "
                 "autotuning"),
    **not_needed("whet logs every step", "log_dir tensorboard_dir log_interval log_grad_pct_zeros log_param_norm "
                 "log_grad_norm log_optimizer_states log_gradient_noise_scale gradient_noise_scale_n_batches "
                 "gradient_noise_scale_cpu_offload memory_profiling memory_profiling_path profile profile_step_start "
                 "profile_step_stop steps_per_print wall_clock_breakdown dump_state flops_profiler tensorboard "
                 "git_hash"),
    **not_needed("`whet launch` starts runs", "deepspeed deepspeed_mpi deepspeed_slurm deepscale deepscale_config "
                 "user_script launcher hostfile include exclude master_port master_addr force_multi "
                 "detect_nvlink_pairs autotuning_run no_ssh_check comment account deepspeed_extra_args config_files"),
    **not_needed("whet always does this, or finds it out by itself", "eval_iters tokenizer_type allow_chopped "
                 "is_pipe_parallel optimizer_type iteration batch_iteration_offset do_train do_valid do_test "
                 "short_seq_prob onnx_safe no_save_rng no_load_optim no_load_rng override_lr_scheduler "
                 "use_checkpoint_lr_scheduler checkpoint_validation_with_forward_pass"),
}  # fmt: skip


def refuse_other_training(draft: Draft) -> None:
    """Preference and reward training is another thing than fine-tuning."""
    if draft.text("train_impl") not in (None, "normal") or draft.text("dataset_impl") not in (None, "gpt2"):
        key = "train_impl" if draft.text("train_impl") not in (None, "normal") else "dataset_impl"
        raise draft.fail(key, "is not supervised fine-tuning, and whet trains only on answers. Nothing was imported")
    draft.use("train_impl", "dataset_impl")


def put_parallel(draft: Draft) -> None:
    """Data-parallel processes = GPUs ÷ tensor parallelism ÷ pipeline stages."""
    tensor, stages = max(draft.integer("model_parallel_size") or 1, 1), max(draft.integer("pipe_parallel_size") or 1, 1)
    if tensor > 1:
        draft.put("parallel.tensor", tensor, "model_parallel_size")
    if stages > 1:
        draft.note("no equivalent", "pipe_parallel_size", "pipeline parallelism: whet shards (parallel.shard) instead")
    gpus = draft.integer("global_num_gpus") or draft.integer("world_size")
    nodes, each = draft.integer("num_nodes") or 0, draft.integer("num_gpus") or 0
    if gpus is None and nodes > 0 and each > 0:
        gpus = nodes * each
        draft.put("launch.nodes", nodes, "num_nodes")
        draft.put("launch.gpus", each, "num_gpus")
    draft.use("global_num_gpus", "world_size")
    if gpus is not None and gpus // (tensor * stages) >= 1:
        draft.world = gpus // (tensor * stages)
    deepspeed.put_zero(draft)
    if not draft.has("zero_optimization.stage") and not is_off(draft.raw("zero_stage")):
        put_sharding(draft, "zero_stage")
    draft.put(
        "parallel.recompute", "full" if draft.flag("checkpoint_activations") else "none", "checkpoint_activations"
    )
    if draft.flag("checkpoint_in_cpu") and "parallel.offload" not in draft.settings:
        draft.put("parallel.offload", "activations", "checkpoint_in_cpu")


def put_batch(draft: Draft) -> None:
    """train_batch_size = micro-batch × accumulation × data-parallel processes, which NeoX asserts."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    size, micro, accumulation = (draft.integer(key) for key in keys)
    for key, value in zip(keys, (size, micro, accumulation), strict=True):
        if value is not None and value < 1:
            raise draft.fail(key, "is not a positive integer")
    micro, accumulation = micro or 1, accumulation or 1
    unit = "conversations" if draft.text("pack_impl") == "unpacked" else "rows"
    draft.put("train.micro_rows", micro, keys[1])
    product = micro * accumulation
    if size is None:
        total = product * (draft.world or 1)
        why = f"{micro} × {accumulation} × {draft.world or 1} data-parallel processes"
        draft.put(f"train.batch.{unit}", total, keys[1], keys[2], why=why)
        if draft.world is None:
            draft.note("decide", keys[1], f"the file does not say on how many GPUs it ran. train.batch.{unit} is "
                       f"{total}, for one data-parallel process: multiply it by their number")  # fmt: skip
        return
    draft.put(f"train.batch.{unit}", size, keys[0])
    draft.use(keys[2])
    if (draft.world is not None and product * draft.world != size) or size % product:
        expected = f"{micro} × {accumulation} × {draft.world or 'processes'}"
        result = f" = {product * draft.world}" if draft.world else ""
        draft.note("decide", keys[0], f"{size} is not {expected}{result}, and NeoX refuses that. {size} is written")
    elif draft.world is None:
        draft.note("different", keys[0], f"stands for {size // product} data-parallel processes of {micro} × "
                   f"{accumulation}; the file does not name their number. whet takes {size} on any number")  # fmt: skip


def put_training(draft: Draft) -> None:
    """Length, optimizer, schedule, precision, checkpoints."""
    if (steps := draft.integer("train_iters")) is not None:
        draft.put("train.steps", steps, "train_iters")
    elif draft.has("train_epochs"):
        draft.put("train.epochs", draft.number("train_epochs"), "train_epochs")
    _put_optimizer(draft)
    _put_schedule(draft, steps)
    _put_precision(draft)
    if draft.has("clip_grad"):
        draft.note("different", "clip_grad", "is overwritten by gradient_clipping, which is 1.0 if absent")
    factor = draft.number("checkpoint_factor")
    if factor and str(draft.text("checkpoint_scale") or "linear") == "linear":
        draft.put("checkpoint.every", int(factor), "checkpoint_factor")
    elif factor:
        draft.note("no equivalent", "checkpoint_scale", "growing intervals; checkpoint.every is constant")
    if (kept := draft.integer("keep_last_n_checkpoints")) is not None and kept > 0:
        draft.put("checkpoint.keep_last", kept, "keep_last_n_checkpoints")
    if draft.flag("no_save_optim"):
        draft.put("checkpoint.optimizer", "none", "no_save_optim")
    if draft.integer("eval_interval"):
        draft.put("eval.every", draft.integer("eval_interval"), "eval_interval")


def _put_optimizer(draft: Draft) -> None:
    """Adam is apex's FusedAdam, with decoupled weight decay."""
    draft.put("train.optimizer.name", "adamw", "optimizer.type")
    params = "optimizer.params"
    for key, default in (("betas", [0.9, 0.999]), ("eps", 1e-8)):
        if not draft.has(f"{params}.{key}"):
            draft.put(f"train.optimizer.{key}", default)
    deepspeed.put_optimizer(draft)
    if not draft.has(f"{params}.lr") and (rate := draft.number("lr")) is not None:
        draft.put("train.optimizer.lr", rate, "lr")
    if not draft.has(f"{params}.weight_decay"):
        draft.put("train.optimizer.weight_decay", draft.number("weight_decay"), "weight_decay")
    elif draft.has("weight_decay"):
        draft.note("different", "weight_decay", f"{params}.weight_decay wins")
    if draft.flag("use_bnb_optimizer"):
        draft.put("train.optimizer.name", "adamw8bit", "use_bnb_optimizer")


def _put_schedule(draft: Draft, steps: int | None) -> None:
    style = draft.text("lr_decay_style") or "linear"
    if style not in ("constant", "linear", "cosine"):
        draft.note(
            "no equivalent", "lr_decay_style", f"{style}: whet has constant, linear, cosine and wsd; linear is written"
        )
        style = "linear"
    draft.put("train.schedule.name", style, "lr_decay_style")
    warmup = draft.number("warmup") or 0
    if not 0 <= warmup <= 1:
        raise draft.fail("warmup", "is a fraction of the run, from 0 to 1")
    horizon = draft.integer("lr_decay_iters") or steps
    if warmup and horizon:
        draft.put(
            "train.schedule.warmup", int(warmup * horizon), "warmup", "train_iters", why=f"{warmup} of {horizon} steps"
        )
    else:
        draft.put("train.schedule.warmup", float(warmup) if warmup else 0, "warmup")
    rate, lowest = draft.settings.get("train.optimizer.lr"), draft.number("min_lr")
    if lowest and rate is not None and isinstance(rate.value, int | float) and rate.value > 0:
        draft.put("train.schedule.min_frac", fraction(lowest / rate.value), "min_lr", why=f"{lowest} ÷ {rate.value}")
        if style == "linear":
            draft.note("different", "min_lr", "NeoX decays towards 0 and stops at min_lr; whet's line ends there")
    for key in ("lr_decay_iters", "lr_decay_fraction"):
        if draft.has(key) and not (key == "lr_decay_iters" and draft.raw(key) == steps):
            draft.note(
                "different",
                key,
                "the rate would reach its end before or after the end of the run; whet's reaches it at the last step",
            )
    draft.use("lr_decay_iters")
    if draft.has("scheduler"):
        draft.note("different", "scheduler", "NeoX has its own; lr_decay_style and warmup count")


def _put_precision(draft: Draft) -> None:
    names = {"fp16": "fp16", "bfloat16": "bf16", "bf16": "bf16", "fp32": "fp32"}
    given = draft.text("precision")
    if given is not None:
        if given not in names:
            raise draft.fail("precision", "is not fp16, bfloat16 or fp32")
        draft.put("train.precision", names[given], "precision")
        draft.use("fp16.enabled", "bf16.enabled")
        return
    draft.put("train.precision", "fp32", "precision", why="neither fp16 nor bf16 is on")
    deepspeed.put_precision(draft)


_PACKING = {"packed": "best-fit", "pack_until_overflow": "best-fit", "unpacked": "none", "k_bin_packed": "k-bin"}


def put_data(draft: Draft) -> None:
    """.bin files with their mask, named without the suffix as NeoX does."""
    for key, weights, to in (
        ("train_data_paths", "train_data_weights", "data.sources"),
        ("valid_data_paths", "valid_data_weights", "data.validation.sources"),
    ):
        shares = draft.raw(weights) or []
        for number, prefix in enumerate(draft.texts(key)):
            draft.put(f"{to}.{number}.path", prefix.removesuffix(".bin"), key)
            draft.put(f"{to}.{number}.format", "tokens", key)
            _put_mask(draft, f"{to}.{number}.mask")
            if isinstance(shares, list) and len(shares) == len(draft.texts(key)) and len(shares) > 1:
                draft.put(f"{to}.{number}.weight", shares[number], weights)
    if not draft.has("train_data_paths") and draft.has("data_path"):
        draft.put("data.sources.0.path", (draft.text("data_path") or "").removesuffix(".bin"), "data_path")
        draft.put("data.sources.0.format", "tokens", "data_path")
        _put_mask(draft, "data.sources.0.mask")
        _put_split(draft)
    _note_mask(draft)
    if draft.has("test_data_paths"):
        draft.note("no equivalent", "test_data_paths", "a test at the end: `whet eval` measures any data")
    length = draft.integer("seq_length")
    if length is not None:
        draft.put("data.max_length", length, "seq_length")
    packing = draft.text("pack_impl") or "packed"
    if packing not in _PACKING:
        raise draft.fail("pack_impl", f"is not one of {', '.join(_PACKING)}")
    draft.put("data.packing", _PACKING[packing], "pack_impl")
    if packing in ("packed", "pack_until_overflow"):
        draft.put("data.too_long", "split", "pack_impl")
        draft.note("different", "pack_impl", "cuts documents at the ends of rows, and they attend to each other; whet "
                   "packs whole documents that do not")  # fmt: skip
    else:
        draft.put("data.too_long", "drop", "pack_impl", why="documents longer than a row are left out")


def _put_split(draft: Draft) -> None:
    try:
        parts = [float(part) for part in str(draft.raw("split") or "969, 30, 1").split(",")]
    except ValueError:
        raise draft.fail("split", "is not three numbers such as 969, 30, 1") from None
    if len(parts) > 1 and 0 < parts[1] < sum(parts):
        draft.put("data.validation.fraction", fraction(parts[1] / sum(parts)), "split")
        if len(parts) > 2 and parts[2]:
            draft.note("different", "split", "the last part is for a test; whet trains on it")


_MASKS = {
    "loss_mask_pairs": "pairs",
    "loss_mask_individual": "individual",
    "loss_mask_alternating_individual": "alternating",
}


def _put_mask(draft: Draft, to: str) -> None:
    for key, rule in _MASKS.items():
        ids = draft.raw(key)
        if not ids:
            continue
        flat = (
            [each for part in ids for each in (part if isinstance(part, list) else [part])]
            if isinstance(ids, list)
            else None
        )
        if flat is None or not all(isinstance(each, int) and not isinstance(each, bool) for each in flat):
            raise draft.fail(key, "is not a list of token ids")
        if rule == "pairs":
            if len(flat) % 2:
                raise draft.fail(key, "is not a list of pairs: its length is odd")
            draft.put(f"{to}.pairs", [flat[i : i + 2] for i in range(0, len(flat), 2)], key)
        else:
            draft.put(f"{to}.{rule}", flat, key)


def _note_mask(draft: Draft) -> None:
    """The mask is in these keys and nowhere else: SFT_ENABLED=1 in a launch script only prints itself."""
    draft.put("data.train_on", "all", *(key for key in _MASKS if draft.has(key)), why="what the masks leave")
    if not any(draft.raw(key) for key in _MASKS):
        draft.note("decide", "loss_mask_pairs", "there is no loss_mask_* key, so NeoX trains on every token, questions "
                   "too, whatever SFT_ENABLED says; so does this recipe. For LUMI's markers: mask: {pairs: [[7, 7]], "
                   "alternating: [8]} in each source")  # fmt: skip
    if draft.flag("eod_mask_loss"):
        draft.note("decide", "eod_mask_loss", "masks the token after each end of document: set mask.eod of each "
                   "source to the id of the tokenizer's end-of-document token")  # fmt: skip
    for key in ("train_label_data_paths", "valid_label_data_paths", "test_label_data_paths"):
        if draft.has(key):
            draft.note("decide", key, "separate label files decide what is trained, and whet does not support them: "
                       "this recipe trains on every token that mask leaves")  # fmt: skip


def put_model(draft: Draft) -> None:
    """The checkpoint must be converted first; weights alone are taken, as with finetune: true."""
    if draft.has("load"):
        draft.put("model.path", draft.text("load"), "load")
        draft.note("decide", "load", "a checkpoint of NeoX: convert it (whet import checkpoint neox "
                   f"{draft.text('load')} --out MODEL) and set model.path=MODEL")  # fmt: skip
    if (folder := draft.text("save")) is not None and Path(folder) == Path(draft.text("load") or ""):
        draft.note("decide", "save", "holds the checkpoint to start from, too, and a run needs a folder of its own: "
                   "set run.dir")  # fmt: skip
    elif folder is not None:
        draft.put("run.dir", folder, "save")
    if draft.has("finetune") and not draft.flag("finetune"):
        draft.note(
            "no equivalent", "finetune", "off resumes optimizer and step of a NeoX run; whet starts from its weights"
        )
    else:
        draft.use("finetune")
    if draft.has("vocab_file"):
        path = draft.text("vocab_file") or ""
        draft.put("model.tokenizer", path.removesuffix("/tokenizer.json"), "vocab_file")
    if draft.has("soft_prompt_tuning"):
        draft.note("no equivalent", "soft_prompt_tuning", "prompt tuning")


KIND = Kind(
    "neox",
    "GPT-NeoX (LUMI, 2026-07)",
    _ROWS,
    (refuse_other_training, put_parallel, put_training, put_batch, put_data, put_model),
    defaults={"weight_decay": 0.1, "warmup": 0.01, "gradient_clipping": 1.0, "eval_interval": 1000, "seed": 1234,
              "lr_decay_style": "linear", "pack_impl": "packed"},
)  # fmt: skip
