"""Private APIs and monkeypatches of torch, transformers, peft and bitsandbytes, one function each.

The rest of whet calls these functions. Each docstring names the private API and what whet needs it for. All were seen
to work with torch 2.11 and 2.13, transformers 5.17 and 5.22, peft 0.21 and bitsandbytes 0.50; the upper
bounds in pyproject.toml follow from that. After an upgrade run tests/compat first: it fails where an API has changed.
"""

from whet.compat.transformers_start import keep_import_structure

keep_import_structure()
