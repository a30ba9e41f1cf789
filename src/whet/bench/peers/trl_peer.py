"""The benchmark of TRL: `python trl_peer.py SETTINGS.json`. Does not import whet.

`config` in the settings has the keys of `trl sft --config`: of the model, LoRA and SFTConfig.
"""

from __future__ import annotations

from typing import Any

from timed_sft import conversations, run_script, train_timed

_NOT_SFT = ("model_name_or_path", "dtype", "attn_implementation", "datasets", "use_peft", "load_in_4bit",
            "bnb_4bit_quant_type", "use_bnb_nested_quant")  # fmt: skip


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train a model with random weights, with LoRA if configured."""
    from transformers import AutoTokenizer

    config: dict[str, Any] = settings["config"]
    arguments = {key: value for key, value in config.items() if key not in _NOT_SFT and not key.startswith("lora_")}
    parts: dict[str, Any] = {}
    if config.get("use_peft"):
        from peft import LoraConfig

        parts["peft_config"] = LoraConfig(
            r=config["lora_r"], lora_alpha=config["lora_alpha"], lora_dropout=config["lora_dropout"],
            target_modules=config["lora_target_modules"], task_type="CAUSAL_LM",
        )  # fmt: skip
    return train_timed(
        settings,
        arguments,
        model=_quantized(config) if config.get("load_in_4bit") else _random(config, settings["device"]),
        processing_class=AutoTokenizer.from_pretrained(config["model_name_or_path"]),
        train_dataset=conversations(settings, "input_ids"),
        **parts,
    )


def _random(config: dict[str, Any], device: str) -> Any:
    """Random weights, created on the device, as whet does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = AutoConfig.from_pretrained(config["model_name_or_path"])
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            shape, dtype=getattr(torch, config["dtype"]), attn_implementation=config["attn_implementation"]
        )


def _quantized(config: dict[str, Any]) -> Any:
    """From files: weights are quantized to 4 bits while loading."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = getattr(torch, config["dtype"])
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=config["bnb_4bit_quant_type"], bnb_4bit_compute_dtype=dtype,
        bnb_4bit_use_double_quant=config["use_bnb_nested_quant"],
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(
        config["model_name_or_path"], dtype=dtype, attn_implementation=config["attn_implementation"],
        quantization_config=quantization, device_map={"": 0},
    )  # fmt: skip


if __name__ == "__main__":
    run_script(run)
