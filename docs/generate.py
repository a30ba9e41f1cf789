"""Write the pages that are made from the code: docs/config.md. `make docs` calls this; a test holds them current."""

from pathlib import Path

from whet.config import Config
from whet.core.config import Setting, list_settings

PAGE = Path(__file__).parent / "config.md"
_HEAD = """# Every setting

Made from the code by `make docs`; `whet config` prints the same. A recipe is a YAML file with these keys; a dot stands
for a level. Change one on the command line with `KEY=VALUE`, for example `train.steps=100`.
"""


def config_page() -> str:
    """docs/config.md as it should be."""
    parts = [_HEAD]
    section = ""
    for knob in list_settings(Config):
        top = knob.key.partition(".")[0]
        if top != section:
            section = top
            parts.append(f"\n## {top}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.append(_row(knob))
    return "".join(parts)


def _row(knob: Setting) -> str:
    cells = (f"`{knob.key}`", knob.type, f"`{knob.default}`" if knob.default else "", knob.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(config_page())
