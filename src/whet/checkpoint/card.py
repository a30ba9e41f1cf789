"""What whoever loads an export has to know and cannot see in its weights."""

from __future__ import annotations

from pathlib import Path

_ADAPTER = """
## Trained over a base in 4 bits

The base model was kept in NF4 (bitsandbytes, double quantisation) while this adapter was trained. It answers as it was
measured on a base that is loaded the same way:

```python
from peft import AutoPeftModelForCausalLM
from transformers import BitsAndBytesConfig

nf4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype="{dtype}",
)
model = AutoPeftModelForCausalLM.from_pretrained("THIS FOLDER", quantization_config=nf4)
```

On a base that is not in 4 bits it works too; answers then differ by what 4 bits lose.
"""
_MERGED = """
## Trained over a base in 4 bits

The base model was kept in NF4 (bitsandbytes, double quantisation) during training. These weights are the 4-bit ones
turned back into {dtype}, with the adapter added. So they differ from the original model's by what 4 bits lose, too.
"""


def note_quantized(folder: Path, kind: str, dtype: str) -> None:
    """Say in the model card of an export that its base was in 4 bits; peft writes a card for adapters."""
    card = folder / "README.md"
    before = card.read_text(encoding="utf-8") if card.exists() else ""
    note = (_ADAPTER if kind == "adapter" else _MERGED).format(dtype=dtype)
    card.write_text(f"{before.rstrip()}\n{note}".lstrip(), encoding="utf-8")
