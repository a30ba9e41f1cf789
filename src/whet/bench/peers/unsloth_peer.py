"""Unsloth's side of a comparison: `python unsloth_peer.py SETTINGS.json`. It does not import whet.

`config` in the settings has the arguments of the three calls that Unsloth's users write: `from_pretrained`,
`get_peft_model` and `SFTConfig`.
"""

from __future__ import annotations

import os
from typing import Any

from sft_race import conversations, follow, race


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """The model from its folder, adapters if asked for, and the steps."""
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")  # it would ask the network
    from unsloth import FastLanguageModel  # first: it changes the libraries that are imported after it

    config: dict[str, Any] = settings["config"]
    model, tokenizer = FastLanguageModel.from_pretrained(**config["from_pretrained"], local_files_only=True)
    if "get_peft_model" in config:
        model = FastLanguageModel.get_peft_model(model, **config["get_peft_model"])
    return race(
        settings,
        config["SFTConfig"],
        model=model,
        processing_class=tokenizer,
        # Text: for ready ids it would take a collator that lets packed conversations see each other.
        train_dataset=conversations(settings, "text"),
    )


if __name__ == "__main__":
    follow(run)
