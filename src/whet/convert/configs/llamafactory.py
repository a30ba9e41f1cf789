"""LLaMA-Factory's YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from whet.convert.configs.draft import Draft, is_off, without_secrets
from whet.convert.configs.huggingface import DEFAULTS, HUB, LOGS, ROWS, SPEED, put_deepspeed, put_training_arguments
from whet.convert.configs.read import find_file
from whet.convert.configs.rules import (
    LAUNCHER_ROWS,
    put_adapter,
    put_batch,
    put_launcher,
    put_targets,
    put_validation_size,
)
from whet.convert.configs.table import Kind, Rows, by_rule, copied, no_equivalent, not_needed, same_as
from whet.convert.configs.trl import dataset_path
from whet.core.files import read_json, user_path

DATA_ROWS: Rows = {
    **by_rule(
        "dataset eval_dataset dataset_dir train_on_prompt mask_history val_size packing neat_packing template "
        "max_samples mix_strategy interleave_probs"
    ),
    **same_as(cutoff_len="max_length"),
    **no_equivalent("streaming: whet prepares the data before step 1", "streaming buffer_size"),
    **no_equivalent("the template's own", "tool_format default_system enable_thinking preserve_thinking"),
    **no_equivalent("one validation loss over all sources", "eval_on_each_dataset"),
    **no_equivalent("data prepared by another program; whet keeps its own", "tokenized_path"),
    **no_equivalent("images and sound", "media_dir"),
    **not_needed(SPEED, "overwrite_cache preprocessing_batch_size preprocessing_num_workers eval_num_beams "
                 "data_shared_file_system"),
    **not_needed("padding is never learned", "ignore_pad_token_for_loss"),
}  # fmt: skip
"""Also of MindSpeed-LLM, whose data handling comes from LLaMA-Factory."""

TOKEN_ROWS: Rows = {
    **by_rule("add_tokens add_special_tokens"),
    **no_equivalent("new tokens start as the mean of the tokens they were split into", "new_special_tokens_config "
                    "init_special_tokens"),
    **not_needed("whet resizes the vocabulary for model.add_tokens by itself", "resize_vocab"),
    **no_equivalent("special tokens in the text are never split", "split_special_tokens"),
    **not_needed("read from the environment (HF_TOKEN)", "hf_hub_token ms_hub_token om_hub_token"),
    **not_needed(SPEED, "cache_dir use_fast_tokenizer"),
}  # fmt: skip

_ROWS: Rows = {
    **ROWS,
    **DATA_ROWS,
    **TOKEN_ROWS,
    **LAUNCHER_ROWS,
    **by_rule("stage finetuning_type lora_alpha lora_dropout use_rslora use_dora quantization_bit quantization_method "
              "pure_bf16 use_muon disable_gradient_checkpointing fp8"),
    **same_as(lora_rank="lora_r", lora_target="lora_target_modules", additional_target="lora_modules_to_save",
              quantization_type="bnb_4bit_quant_type"),
    **copied("text", model_name_or_path="model.path", model_revision="model.revision"),
    **copied("flag", trust_remote_code="model.trust_remote_code"),
    **no_equivalent("continues an adapter; merge it first (`whet merge`) and give the result as model.path",
                    "adapter_name_or_path adapter_folder create_new_adapter"),
    **no_equivalent("the model's own positions and attention are used", "rope_scaling shift_attn mixture_of_depths "
                    "block_diag_attn model_max_length"),
    **copied("number", moe_aux_loss_coef="train.router_aux_loss"),
    **no_equivalent("random weights: model.path: random:FOLDER", "train_from_scratch"),
    **no_equivalent("trains a part of the layers", "freeze_trainable_layers freeze_trainable_modules "
                    "freeze_extra_modules use_llama_pro"),
    **no_equivalent("a method other than LoRA, DoRA and rsLoRA", "loraplus_lr_ratio loraplus_lr_embedding pissa_init "
                    "pissa_iter pissa_convert module_dropout oft_rank oft_block_size oft_target"),
    **no_equivalent("an optimizer other than AdamW and Muon", "use_galore galore_target galore_rank "
                    "galore_update_interval galore_scale galore_proj_type galore_layerwise use_apollo apollo_target "
                    "apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type apollo_scale_type "
                    "apollo_layerwise apollo_scale_front use_badam badam_mode badam_start_block badam_switch_mode "
                    "badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose use_adam_mini"),
    **no_equivalent("a loss other than the log-likelihood", "use_dft_loss use_asft_loss asft_alpha use_eaft_loss "
                    "eaft_alpha pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight "
                    "kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target "
                    "ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model "
                    "reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha"),
    **no_equivalent("another engine", "use_mca use_megatron_bridge megatron_bridge_args use_hyper_parallel "
                    "hyper_parallel_args hyper_parallel_cp_size use_kt kt_cpu_activation kt_weight_path "
                    "kt_non_expert_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num "
                    "kt_lora_expert_intermediate_size use_unsloth use_unsloth_gc"),
    **no_equivalent("stops a run by a rule", "early_stopping_steps"),
    **no_equivalent("whet shuffles; the order follows run.seed", "disable_shuffling"),
    **no_equivalent("images, video and sound", "image_max_pixels image_min_pixels image_do_pan_and_scan "
                    "crop_to_patches video_max_pixels video_min_pixels video_fps video_maxlen use_audio_in_video "
                    "audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector freeze_language_model"),
    **no_equivalent("a tracker that whet does not have (track)",
                    "use_swanlab swanlab_project swanlab_workspace swanlab_run_name "
                    "swanlab_mode swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret"),
    **no_equivalent(HUB, "export_hub_model_id"),
    **no_equivalent("Ray", "ray_num_workers ray_init_kwargs master_addr master_port ray_run_name ray_storage_path "
                    "ray_storage_filesystem placement_strategy resources_per_worker"),
    **not_needed("`whet export` has its own options", "export_dir export_size export_device export_quantization_bit "
                 "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen "
                 "export_legacy_format"),
    **not_needed("profile has its own options", "enable_torch_profiler profiler_output_dir profiler_wait_steps "
                 "profiler_warmup_steps profiler_active_steps profiler_repeat profiler_record_shapes "
                 "profiler_profile_memory profiler_with_stack profile_modules"),
    **not_needed(SPEED, "flash_attn enable_liger_kernel use_reentrant_gc upcast_layernorm upcast_lmhead_output "
                 "infer_backend offload_folder use_kv_cache use_v1_kernels infer_dtype double_quantization "
                 "quantization_device_map compute_dtype device_map fp8_backend fp8_enable_fsdp_float8_all_gather "
                 "vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank vllm_config sglang_maxlen "
                 "sglang_mem_fraction sglang_tp_size sglang_config sglang_lora_backend"),
    **not_needed(LOGS, "include_effective_tokens_per_second print_param_status compute_accuracy"),
    **not_needed("settings of chatting", "do_sample temperature top_p top_k num_beams max_new_tokens "
                 "repetition_penalty length_penalty skip_special_tokens"),
}  # fmt: skip


def refuse_other_stages(draft: Draft) -> None:
    """whet fine-tunes (sft) and continues pre-training (pt)."""
    stage = draft.text("stage")
    if stage not in ("sft", "pt"):
        raise draft.fail(
            "stage", "is not supervised fine-tuning, and whet trains only on answers. Nothing was imported"
        )
    if stage == "sft":
        draft.use("stage")


def put_mask(draft: Draft) -> None:
    """What is learned: answers, everything, or the last answer; in stage pt every token of plain text."""
    if draft.text("stage") == "pt":
        draft.put("data.train_on", "all", "stage", why="pre-training")
    elif draft.flag("train_on_prompt"):
        draft.put("data.train_on", "all", "train_on_prompt")
    elif draft.flag("mask_history"):
        draft.put("data.train_on", "last", "mask_history")
    else:
        draft.put("data.train_on", "assistant", "train_on_prompt", "mask_history")


def put_rows(draft: Draft) -> None:
    """Packing, and with it the unit of the batch."""
    packing = draft.flag("packing") or draft.flag("neat_packing") or draft.text("stage") == "pt"
    length = draft.integer("max_length") or 2048
    draft.put("data.max_length", length, "max_length")
    draft.put("data.too_long", "truncate", "max_length", why="what is longer is cut")
    keys = [key for key in ("packing", "neat_packing") if draft.has(key)] or ["packing"]
    draft.put("data.packing", "best-fit" if packing else "none", *keys)
    if packing and not draft.flag("neat_packing"):
        draft.note("different", keys[0], "without neat_packing, packed conversations attend to each other; in whet "
                   "they never do")  # fmt: skip
    put_batch(draft, "rows" if packing else "conversations")


def put_sources(draft: Draft) -> None:
    """Names of datasets, looked up in dataset_info.json if it is there."""
    folder = user_path(draft.text("dataset_dir") or "")
    listed = _dataset_info(draft, folder)
    for key, to in (("dataset", "data.sources"), ("eval_dataset", "data.validation.sources")):
        if not draft.has(key):
            continue
        for number, name in enumerate(_names(draft, key)):
            _put_source(draft, key, f"{to}.{number}", name, listed.get(name), folder)
    if draft.has("dataset") and not listed:
        draft.note("decide", "dataset", f"{folder / 'dataset_info.json'}, which says where these datasets are, was not "
                   "found: set the path of each source")  # fmt: skip
    draft.use("dataset_dir")
    put_validation_size(draft, "val_size")
    names = _names(draft, "dataset") if draft.has("dataset") else []
    given = draft.raw("interleave_probs")
    weights = given if isinstance(given, list) else draft.texts("interleave_probs")
    if not weights and str(draft.text("mix_strategy")).startswith("interleave") and len(names) > 1:
        weights = [1.0] * len(names)  # in turns
    for number, weight in enumerate(weights[: len(names)]):
        draft.put(f"data.sources.{number}.weight", _number(draft, weight), "interleave_probs", "mix_strategy")
    if str(draft.text("mix_strategy") or "concat") != "concat":
        draft.note("different", "mix_strategy", "ends when a dataset is exhausted; in whet, weights give shares of an "
                   "epoch")  # fmt: skip
    if draft.has("template"):
        draft.note("decide", "template", "a template of this program's; whet uses the tokenizer's own. Check with "
                   "`whet inspect`, or give a .jinja file in data.template")  # fmt: skip


def _number(draft: Draft, text: Any) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        raise draft.fail("interleave_probs", f"has {text!r}, which is not a number") from None


def _names(draft: Draft, key: str) -> list[str]:
    given = draft.raw(key)
    if isinstance(given, dict):
        return [str(given.get("file_name") or given.get("path") or next(iter(given), ""))]
    return draft.texts(key)


def _dataset_info(draft: Draft, folder: Path) -> dict[str, Any]:
    file = find_file(str(folder / "dataset_info.json"), draft.file.parent)
    listed = None if file is None else read_json(file)
    return listed if isinstance(listed, dict) else {}


_FIELDS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system",
           "messages": "messages", "tools": "tools"}  # fmt: skip
"""Columns of dataset_info.json → fields of whet's formats."""
_USUAL_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip
"""How dataset_info.json names keys and roles of turns, with the names that whet reads."""
_INFO_KEYS = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "subset", "split", "columns", "formatting", "tags",
              "num_samples"}  # fmt: skip


def _put_source(draft: Draft, key: str, to: str, name: str, info: Any, folder: Path) -> None:
    info = info if isinstance(info, dict) else {}
    if info.get("file_name"):
        path = str(folder / str(info["file_name"]))
    elif hub := info.get("hf_hub_url"):
        path = f"hub:{hub}"
    else:
        path = dataset_path(draft, name) if "/" in name or "." in name else str(folder / name)
    draft.put(f"{to}.path", path, key, why=f"the dataset {name}")
    for given, target in (("subset", "subset"), ("split", "split")):
        if info.get(given) and path.startswith("hub:"):
            draft.put(f"{to}.{target}", str(info[given]), key)
    columns = info.get("columns")
    if isinstance(columns, dict):
        fields = {_FIELDS[each]: str(column) for each, column in columns.items() if each in _FIELDS and column}
        sharegpt = info.get("formatting") in ("sharegpt", "openai")
        fields = {
            each: column
            for each, column in fields.items()
            if sharegpt == (each == "messages") or each in ("system", "tools")
        }
        draft.put(f"{to}.fields", fields, key)
    limits = [each for each in (info.get("num_samples"), draft.integer("max_samples")) if isinstance(each, int)]
    if limits and min(limits) > 0:
        draft.put(f"{to}.max_samples", min(limits), "max_samples", key)
    _note_info(draft, key, name, info)


def _mapping(info: dict[str, Any], key: str) -> dict[str, Any]:
    found = info.get(key)
    return found if isinstance(found, dict) else {}


def _note_info(draft: Draft, key: str, name: str, info: dict[str, Any]) -> None:
    """What dataset_info.json says of a dataset and a source of whet does not have."""
    for column in sorted(_mapping(info, "columns").keys() - _FIELDS.keys()):
        draft.note("no equivalent", key, f"{name}: columns.{column}: {info['columns'][column]!r} is not read")
    for tag, value in _mapping(info, "tags").items():
        if value not in _USUAL_TAGS.get(tag, ()):
            usual = " or ".join(_USUAL_TAGS.get(tag, ("nothing of this name",)))
            text = f"{name}: tags.{tag}: {value!r}: whet reads {usual}. Rename it in the data"
            if tag in ("role_tag", "content_tag"):
                text += ", or set format: sharegpt and fields: {from: …, value: …}"
            draft.note("decide", key, text)
    for other in sorted(info.keys() - _INFO_KEYS):
        if not is_off(info[other]):
            shown = without_secrets(info[other], other)
            draft.note("no equivalent", key, f"{name}: {other}: {shown!r} has no equivalent in a source")


def put_method(draft: Draft) -> None:
    """LoRA unless finetuning_type says otherwise; alpha is twice the rank unless given."""
    method = draft.text("finetuning_type")
    if method == "lora":
        put_adapter(draft, "finetuning_type")
        put_targets(draft)
        if not draft.has("lora_alpha"):
            draft.put("adapter.alpha", 2 * (draft.integer("lora_r") or 8), "lora_r", why="twice the rank")
    elif method == "full":
        draft.use("finetuning_type")
        if draft.flag("pure_bf16"):
            draft.put("model.dtype", "bf16", "pure_bf16")
            draft.put("train.precision", "bf16", "pure_bf16")
    else:
        draft.note("no equivalent", "finetuning_type", "whet trains every weight, or LoRA, rsLoRA, DoRA")
    bits = draft.integer("quantization_bit")
    if method == "lora" and bits == 4 and draft.text("quantization_method") in (None, "bnb"):
        draft.put("quantize", "nf4", "quantization_bit")
        draft.use("quantization_method", "bnb_4bit_quant_type")
    elif bits is not None:
        draft.note("no equivalent", "quantization_bit", "whet quantizes the frozen weights of LoRA, to 4 bits (nf4)")
    if draft.flag("use_muon"):
        draft.put("train.optimizer.name", "muon", "use_muon")
        draft.note("different", "use_muon", "whet scales Muon's updates by 0.2 · √(longer side); compare learning_rate")
    recompute = "none" if draft.flag("disable_gradient_checkpointing") else "full"
    draft.put("parallel.recompute", recompute, "disable_gradient_checkpointing", why="on unless disabled")
    put_tokens(draft)


def put_tokens(draft: Draft) -> None:
    """New tokens, special or not."""
    keys = [key for key in ("add_tokens", "add_special_tokens") if not is_off(draft.raw(key))]
    if keys:
        draft.put("model.add_tokens", [token for key in keys for token in draft.texts(key)], *keys)


KIND = Kind(
    "llamafactory",
    "LLaMA-Factory 0.9",
    _ROWS,
    (
        put_launcher, refuse_other_stages, put_training_arguments, put_mask, put_rows, put_sources, put_method,
        put_deepspeed,
    ),
    defaults={
        **DEFAULTS, "stage": "sft", "finetuning_type": "lora", "max_length": 2048, "lora_r": 8, "lora_dropout": 0.0,
        "lora_target_modules": "all", "train_on_prompt": False, "mask_history": False, "packing": False,
        "dataset_dir": "data",
    },
    command="llamafactory",
)  # fmt: skip
