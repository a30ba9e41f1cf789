"""The benchmark of Unsloth: `python unsloth_peer.py SETTINGS.json`. Does not import whet.

`config` in the settings has the arguments of the three calls that Unsloth's users write: `from_pretrained`,
`get_peft_model` and `SFTConfig`.
"""

from __future__ import annotations

import os
from typing import Any

from timed_sft import conversations, run_script, train_timed


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Train the model from its folder, with LoRA if configured."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # statistics need a network
    from unsloth import FastLanguageModel  # first: it patches the libraries imported after it

    config: dict[str, Any] = settings["config"]
    model, tokenizer = FastLanguageModel.from_pretrained(**config["from_pretrained"], local_files_only=True)
    if "get_peft_model" in config:
        model = FastLanguageModel.get_peft_model(model, **config["get_peft_model"])
    return train_timed(
        settings,
        config["SFTConfig"],
        model=model,
        processing_class=tokenizer,
        # text: with input_ids it would use a collator whose packed conversations attend to each other
        train_dataset=conversations(settings, "text"),
    )


if __name__ == "__main__":
    run_script(run)
