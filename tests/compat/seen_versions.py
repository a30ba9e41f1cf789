"""Versions with which every test of this folder passed; pyproject.toml has upper bounds that follow from them."""

SEEN = {
    "torch": ("2.11", "2.13"),
    "transformers": ("5.17", "5.22"),
    "peft": ("0.21",),
    "bitsandbytes": ("0.50",),
}
