"""Generate docs/config.md from the code (`make docs`); a test fails when it is out of date."""

from pathlib import Path

from whet.config import Config
from whet.core.config import Setting, list_settings

PAGE = Path(__file__).parent / "config.md"
_HEAD = """# Every setting

Generated from the code by `make docs`; `whet config` prints the same. A recipe is a YAML file with these keys, where a
dot stands for a level. Override one on the command line with `KEY=VALUE`, for example `train.steps=100`.
`${NAME}` in a value is replaced from the environment; the run folder keeps the name, never the value
([secrets](security.md#secrets)).
"""


def config_page() -> str:
    """The content of docs/config.md."""
    parts = [_HEAD]
    section = ""
    for setting in list_settings(Config):
        top = setting.key.partition(".")[0]
        if top != section:
            section = top
            parts.append(f"\n## {top}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts.append(_row(setting))
    return "".join(parts)


def _row(setting: Setting) -> str:
    cells = (f"`{setting.key}`", setting.type, f"`{setting.default}`" if setting.default else "", setting.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(config_page())
