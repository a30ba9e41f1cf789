"""DeepSpeed's ds_config: sharding, offload, batch, optimizer, schedule and precision of a run that has the rest."""

from __future__ import annotations

from whet.convert.configs.draft import Draft, Note
from whet.convert.configs.read import find_file, read_tree
from whet.convert.configs.rules import fraction, put_clipping, put_sharding
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, under
from whet.core.errors import WhetError
from whet.core.yaml import Node

_BUCKETS = "communication of ZeRO, which FSDP2 does by itself"
_NVME = "NVMe offload: whet offloads only to host memory"
_LOGS = "whet has its own profiler and metrics"

ROWS: Rows = {
    **by_rule(
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps fp16.enabled bf16.enabled "
        "bfloat16.enabled bf16.bf16_master_weights_and_grads fp16.loss_scale fp16.initial_scale_power "
        "fp16.loss_scale_window fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale optimizer.type "
        "optimizer.params.lr optimizer.params.betas optimizer.params.eps optimizer.params.weight_decay "
        "optimizer.params.adam_w_mode optimizer.params.bias_correction torch_autocast.enabled torch_autocast.dtype "
        "scheduler.type scheduler.params.warmup_min_lr scheduler.params.warmup_max_lr "
        "scheduler.params.warmup_num_steps scheduler.params.warmup_type scheduler.params.total_num_steps "
        "scheduler.params.warmup_min_ratio scheduler.params.cos_min_ratio zero_optimization.stage "
        "zero_optimization.offload_optimizer.device zero_optimization.offload_param.device "
        "zero_optimization.cpu_offload zero_optimization.cpu_offload_param zero_optimization.mics_shard_size "
        "gradient_clipping"
    ),
    **copied("integer", sequence_parallel_size="parallel.context", tensor_parallel__autotp_size="parallel.tensor"),
    **not_needed(_BUCKETS, under(
        "zero_optimization",
        "contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions allgather_bucket_size "
        "overlap_comm use_multi_rank_bucket_allreduce load_from_fp32_weights elastic_checkpoint sub_group_size "
        "param_persistence_threshold model_persistence_threshold max_live_parameters max_reuse_distance "
        "gather_16bit_weights_on_model_save module_granularity_threshold "
        "prefetch_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
        "stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
        "round_robin_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks leaf_module cpu_offload_use_pin_memory "
        "mics_hierarchical_params_gather save_muon_momentum_buffer_in_memory offload_optimizer.pin_memory "
        "offload_optimizer.buffer_count offload_optimizer.fast_init offload_optimizer.cpuadam_cores_perc "
        "offload_param.pin_memory offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu",
    )),
    **no_equivalent(_NVME, "zero_optimization.offload_optimizer.nvme_path zero_optimization.offload_param.nvme_path "
                    "zero_optimization.offload_optimizer.pipeline_read "
                    "zero_optimization.offload_optimizer.pipeline_write aio nebula"),
    **no_equivalent("quantized or hierarchical communication (ZeRO++)", "zero_optimization.zero_hpz_partition_size "
                                                              "zero_optimization.zero_quantized_weights "
                                                              "zero_optimization.zero_quantized_gradients "
                                                              "zero_optimization.zero_quantized_nontrainable_weights "
                                                              "zero_optimization.zeropp_loco_param"),
    **no_equivalent("part of the optimizer on the CPU", "zero_optimization.offload_optimizer.ratio "
                    "zero_optimization.offload_optimizer.super_offload zero_optimization.zenflow"),
    **no_equivalent("pipeline parallelism", "pipeline"),
    **no_equivalent("16-bit optimizer states: train.optimizer.name: adamw16bit", "bf16.bf16_optimizer_states"),
    **no_equivalent("trains and generates in turn, for RLHF", "hybrid_engine"),
    **no_equivalent("training on parts of the data or the model", "curriculum_learning data_efficiency "
                    "progressive_layer_drop compression_training sparse_attention eigenvalue quantize_training"),
    **no_equivalent("NVIDIA Apex", "amp"),
    **no_equivalent("AMSGrad: train.optimizer has AdamW without it", "optimizer.params.amsgrad"),
    **no_equivalent("searches for a configuration", "autotuning elasticity"),
    **not_needed(_LOGS, "steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler tensorboard "
                 "wandb csv_monitor comms_logger comet monitor_config log_level"),
    **not_needed("affects only speed or memory; whet chooses", "prescale_gradients gradient_predivide_factor "
                 "sparse_gradients fp32_allreduce communication_data_type seq_parallel_communication_data_type "
                 "disable_allgather graph_harvesting compile use_data_before_expert_parallelism "
                 "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer activation_checkpointing data_types "
                 "dataloader_drop_last vocabulary_size checkpoint managed_gradient_accumulation "
                 "bf16.immediate_grad_update bf16.check_grad_overflow bf16.check_overflow fp16.auto_cast "
                 "fp16.fp16_master_weights_and_grads optimizer.params.torch_adam optimizer.legacy_fusion "
                 "optimizer.params.fused torch_autocast.lower_precision_safe_modules "
                 "scheduler.params.last_batch_iteration tensor_parallel.tp_size"),
}  # fmt: skip


def read_values(draft: Draft) -> None:
    """`auto` is not a value: it stands for what the program that calls DeepSpeed has."""
    for key, entry in list(draft.entries.items()):
        if entry.node.value == "auto":
            text = "auto: as in the recipe" if draft.target is not None else "auto: set by what calls DeepSpeed"
            draft.note("not needed", key, text)
            del draft.entries[key]


def put_batch(draft: Draft) -> None:
    """train_batch_size = micro-batch × accumulation × data-parallel processes; two of them give the third."""
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    size, micro, accumulation = (_positive(draft, key) for key in keys)
    if micro is not None:
        draft.put("train.micro_rows", micro, keys[1])
    world = draft.world
    if size is not None and world is not None and micro is not None:
        times = accumulation or max(size // (micro * world), 1)
        expected = micro * times * world
        if expected != size:
            draft.note("different", keys[0], f"is not {micro} × {times} × {world} processes = {expected}, and "
                       f"DeepSpeed refuses it; {size} is written")  # fmt: skip
    unit = _unit(draft)
    if size is not None:
        draft.put(f"train.batch.{unit}", size, keys[0])
        draft.use(keys[2])
    elif micro is not None and (accumulation is not None or draft.target is None):
        total = micro * (accumulation or 1) * (world or 1)
        why = f"{micro} × {accumulation or 1} × {world or 1} processes"
        draft.put(f"train.batch.{unit}", total, keys[1], keys[2], why=why)
        if world is None:
            draft.note("decide", keys[1], f"the file does not say on how many GPUs it ran. train.batch.{unit} is "
                       f"{total}, for one: multiply it by their number")  # fmt: skip


def _unit(draft: Draft) -> str:
    """The unit of the recipe below: a sample of DeepSpeed is whatever the data loader yields."""
    batch = draft.target.at(("train", "batch")).value if draft.target is not None else None
    return "rows" if isinstance(batch, dict) and "rows" in batch else "conversations"


def _positive(draft: Draft, key: str) -> int | None:
    value = draft.integer(key)
    if value is not None and value < 1:
        raise draft.fail(key, "is not a positive integer")
    return value


def put_precision(draft: Draft) -> None:
    """fp16 with its loss scale, bf16; fp32 where both are off by name."""
    bf16 = next((key for key in ("bf16.enabled", "bfloat16.enabled") if draft.has(key)), "bf16.enabled")
    if draft.has(bf16) and draft.flag(bf16):
        draft.put("train.precision", "bf16", bf16)
        draft.use("fp16.enabled")
    elif draft.has("fp16.enabled") and draft.flag("fp16.enabled"):
        draft.put("train.precision", "fp16", "fp16.enabled")
        draft.use(bf16)
        _note_loss_scale(draft)
    elif draft.has("fp16.enabled") and draft.has(bf16):
        draft.put("train.precision", "fp32", "fp16.enabled", bf16, why="neither is on")
    elif not draft.has("fp16.enabled"):  # auto
        _note_loss_scale(draft)
    if draft.has("torch_autocast.enabled") and draft.flag("torch_autocast.enabled"):
        dtype = str(draft.text("torch_autocast.dtype") or "bfloat16").removeprefix("torch.")  # torch's own default
        names = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
        if dtype not in names:
            raise draft.fail("torch_autocast.dtype", "is not bfloat16 or float16")
        draft.put("train.precision", names[dtype], "torch_autocast.enabled", "torch_autocast.dtype")
    if draft.flag("bf16.bf16_master_weights_and_grads"):
        draft.put("model.dtype", "bf16", "bf16.bf16_master_weights_and_grads")


def _note_loss_scale(draft: Draft) -> None:
    if draft.number("fp16.loss_scale"):
        draft.note("no equivalent", "fp16.loss_scale", "a fixed loss scale: whet's moves, from 2^16")
    for key, usual in (
        ("initial_scale_power", 16), ("loss_scale_window", None), ("hysteresis", None), ("min_loss_scale", 1),
        ("consecutive_hysteresis", False),
    ):  # fmt: skip
        name = f"fp16.{key}"
        if draft.has(name) and draft.raw(name) != usual:
            draft.note("different", name, "whet's loss scale starts at 2^16, doubles after 2000 steps without overflow "
                       "and halves with each")  # fmt: skip


_OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw", "deepspeedcpuadam": "adamw",
               "muon": "muon"}  # fmt: skip


def put_optimizer(draft: Draft) -> None:
    """Adam is AdamW here, too: DeepSpeed's adam_w_mode is on unless it is turned off."""
    if draft.has("optimizer.type"):
        name = _OPTIMIZERS.get(str(draft.text("optimizer.type")).lower())
        if name is None:
            draft.note("no equivalent", "optimizer.type", "whet has adamw, adamw16bit, adamw8bit and muon; adamw is "
                       "written")  # fmt: skip
        draft.put("train.optimizer.name", name or "adamw", "optimizer.type")
    if draft.has("optimizer.params.adam_w_mode") and not draft.flag("optimizer.params.adam_w_mode"):
        draft.note("no equivalent", "optimizer.params.adam_w_mode", "weight decay as a part of the gradient (L2): "
                   "whet's is decoupled")  # fmt: skip
    correction = "optimizer.params.bias_correction"
    if draft.has(correction) and draft.flag(correction):
        draft.use(correction)
    elif draft.has(correction):
        draft.note("no equivalent", correction, "Adam without bias correction: whet's has it")
    for key in ("lr", "eps", "weight_decay"):
        if (value := draft.number(f"optimizer.params.{key}")) is not None:
            draft.put(f"train.optimizer.{key}", value, f"optimizer.params.{key}")
    if draft.has("optimizer.params.betas"):
        draft.put("train.optimizer.betas", draft.raw("optimizer.params.betas"), "optimizer.params.betas")
    put_clipping(draft, "gradient_clipping")


_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}


def put_schedule(draft: Draft) -> None:
    """A scheduler in the file replaces that of the program that calls DeepSpeed."""
    if not draft.has("scheduler.type"):
        return
    name = _SCHEDULES.get(str(draft.text("scheduler.type")).lower())
    if name is None:
        draft.note("no equivalent", "scheduler.type", "whet has constant, linear, cosine and wsd; set train.schedule")
        return
    draft.put("train.schedule.name", name, "scheduler.type", why=f"{name} after the warm-up")
    params = "scheduler.params"
    peak = draft.number(f"{params}.warmup_max_lr")
    if peak is not None and name != "cosine":
        draft.put("train.optimizer.lr", peak, f"{params}.warmup_max_lr")
    if (steps := draft.integer(f"{params}.warmup_num_steps")) is not None:
        draft.put("train.schedule.warmup", max(steps, 2), f"{params}.warmup_num_steps")
    if name == "cosine":
        lowest = 1e-4 if (given := draft.number(f"{params}.cos_min_ratio")) is None else given
        draft.put("train.schedule.min_frac", fraction(lowest), f"{params}.cos_min_ratio")
        if start := draft.number(f"{params}.warmup_min_ratio"):
            draft.put("train.schedule.init_frac", fraction(start), f"{params}.warmup_min_ratio")
    elif (start := draft.number(f"{params}.warmup_min_lr")) and (top := peak or _rate(draft)):
        draft.put("train.schedule.init_frac", fraction(start / top), f"{params}.warmup_min_lr")
    if (draft.text(f"{params}.warmup_type") or "log") != "linear":
        key = f"{params}.warmup_type" if draft.has(f"{params}.warmup_type") else "scheduler.type"
        draft.note("different", key, "DeepSpeed warms up along a logarithm unless warmup_type is linear; whet linearly")
    if (total := draft.integer(f"{params}.total_num_steps")) is not None and total > 0:
        draft.put("train.steps", total, f"{params}.total_num_steps")


def _rate(draft: Draft) -> float | None:
    return draft.number("optimizer.params.lr")


def put_zero(draft: Draft) -> None:
    """Stages 1 to 3 become FSDP2, which shards weights, gradients and optimizer state alike (stage 3)."""
    zero = "zero_optimization"
    stage = draft.integer(f"{zero}.stage")
    if stage is not None and stage not in (0, 1, 2, 3):
        raise draft.fail(f"{zero}.stage", "is not a stage of ZeRO: 0, 1, 2 or 3")
    devices = {
        "optimizer": (f"{zero}.offload_optimizer.device", f"{zero}.cpu_offload"),
        "weights": (f"{zero}.offload_param.device", f"{zero}.cpu_offload_param"),
    }
    offload = ""
    for what, (device, legacy) in devices.items():
        where = str(draft.text(device) or "none")
        if where == "nvme":
            draft.note("no equivalent", device, f"{_NVME}; offload to the host's memory is written")
        if where in ("cpu", "nvme") or draft.flag(legacy):
            offload = what
            draft.use(device, legacy)
    if stage:
        if (groups := draft.integer(f"{zero}.mics_shard_size")) is not None and groups > 0:
            draft.put("parallel.shard", groups, f"{zero}.mics_shard_size")
            draft.use(f"{zero}.stage")
        else:
            put_sharding(draft, f"{zero}.stage", "weights" if offload == "weights" else "")
        if stage < 3:
            draft.note("different", f"{zero}.stage", f"ZeRO {stage} does not shard the weights; whet shards as ZeRO 3 "
                       "does, with the same result and less memory")  # fmt: skip
    if offload == "optimizer":
        keys = [key for key in devices["optimizer"] if draft.has(key)]
        draft.put("parallel.offload", "optimizer", *keys)


KIND = Kind(
    "deepspeed",
    "DeepSpeed 0.19",
    ROWS,
    (read_values, put_batch, put_precision, put_optimizer, put_schedule, put_zero),
    partial=True,
)


def include(draft: Draft, key: str) -> None:
    """Take over the DeepSpeed configuration that a key of another file names or holds."""
    given = draft.entries[key].node
    if isinstance(given.value, dict):
        tree = given
    else:
        name = draft.text(key) or ""
        path = find_file(name, draft.file.parent)
        if path is None:
            remedy = "Import it onto the result: whet import config deepspeed FILE --onto RECIPE"
            draft.note("decide", key, f"{name} was not found next to {draft.file.name}. {remedy}")
            return
        tree = read_tree(path)
    if not isinstance(tree.value, dict):
        raise WhetError(f"{tree.place}: a DeepSpeed configuration is a mapping, not {tree.plain()!r}")
    draft.use(key)
    draft.include(_import(draft, tree))


def _import(draft: Draft, tree: Node) -> Draft:
    """The file's settings; batch sizes are those of the arguments, which DeepSpeed requires to be equal."""
    other = Draft(KIND, tree, draft.world, target=draft.tree())
    for rule in KIND.rules:
        rule(other)
    other.finish()
    for to in ("train.micro_rows", "train.batch.conversations", "train.batch.rows"):
        if (node := other.settings.pop(to, None)) is not None:
            text = f"{to} is that of the arguments, and DeepSpeed requires both to be equal"
            other.notes.append(Note("not needed", node.place.rpartition(" ")[2], node.place, node.plain(), text))
    return other
