"""Settings of the export section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from whet.core.config import Section


class ExportConfig(Section):
    """The export at the end of a run."""

    at_end: Literal["none", "hf", "merged", "adapter", "gguf"] = Field(
        default="merged",
        description="What to export when the run finishes: a model folder with adapters merged in (merged; hf is an "
        "alias), only the adapter, a GGUF file, or none. The dtype is the one that the run computes in; `whet export` "
        "offers more.",
    )
