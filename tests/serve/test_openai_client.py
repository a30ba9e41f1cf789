"""What the real openai client gets from a server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from web_servers import running

from whet.data.conversation import Message
from whet.inference.inference_model import InferenceModel, Reply
from whet.inference.sampling import Sampling
from whet.run.models.load_models import load_inference_model, load_models_to_serve, model_names
from whet.serve.app import make_serving_app

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello there"}]


def chat_reply(model: InferenceModel, sampling: Sampling, messages: Sequence[dict[str, str]] = HELLO) -> Reply:
    """What `whet chat` answers."""
    prompt = model.prompt_ids([Message(each["role"], each["content"]) for each in messages])
    return replace(model, sampling=sampling).reply(prompt)


def test_a_streamed_answer_is_that_of_whet_chat(client: Any, tiny: InferenceModel) -> None:
    expected = chat_reply(tiny, Sampling(max_new_tokens=24))
    chunks = list(
        client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_tokens=24, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.prompt_tokens == len(expected.prompt)
    assert chunks[-1].usage.completion_tokens == 24
    whole = client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_completion_tokens=24)
    assert whole.choices[0].message.content == expected.text
    assert len(chunks) > 10


def test_sampled_answers_are_those_of_whet_chat_with_the_same_seed(client: Any, tiny: InferenceModel) -> None:
    expected = chat_reply(tiny, Sampling(temperature=1.5, top_k=0, top_p=0.9, seed=7, max_new_tokens=12))
    many = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=1.5, top_p=0.9, seed=7, max_tokens=12, n=3
    )
    texts = [choice.message.content for choice in many.choices]
    assert texts[0] == expected.text
    assert len(set(texts)) == 3
    again = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=1.5, top_p=0.9, seed=7, max_tokens=12
    )
    assert again.choices[0].message.content == expected.text


def test_stop_strings_end_the_answer_before_them(client: Any, tiny: InferenceModel) -> None:
    text = chat_reply(tiny, Sampling(max_new_tokens=24)).text
    stop = text[9:12]
    for stream in (False, True):
        got = client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_tokens=24, stop=[stop, "no such text"], stream=stream
        )
        if stream:
            chunks = list(got)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.find(stop)]
            assert chunks[-1].choices[0].finish_reason == "stop"
        else:
            assert got.choices[0].message.content == text[: text.find(stop)]
            assert got.choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_that_chat_explains(client: Any, tiny: InferenceModel) -> None:
    reply = chat_reply(tiny, Sampling(max_new_tokens=6))
    explained = tiny.explain(reply, top=2)
    options: dict[str, Any] = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 6}
    whole = client.chat.completions.create(**options, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, stream=True)
    streamed = [each for chunk in chunks if (found := chunk.choices[0].logprobs) for each in found.content]
    assert streamed == whole
    assert [each.token for each in whole] == [each.token for each in explained]
    for each, known in zip(whole, explained, strict=True):
        assert pytest.approx(known.probability, rel=1e-3) == 2.718281828459045**each.logprob
        assert [top.token for top in each.top_logprobs] == [top.token for top in known.likeliest]


def test_completions_continue_text_and_tokens(client: Any, tiny: InferenceModel) -> None:
    tokenizer = tiny.renderer.tokenizer
    ids = tokenizer.backend_tokenizer.encode("Once upon a time").ids
    found = client.completions.create(
        model="tiny", prompt=["Once upon a time", "Hello"], temperature=0, max_tokens=5, logprobs=1
    )
    by_ids = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=5)
    reply = replace(tiny, sampling=Sampling(max_new_tokens=5)).reply(ids)
    assert found.choices[0].text == by_ids.choices[0].text
    assert tokenizer.decode([*ids, *reply.ids]) == "Once upon a time" + found.choices[0].text
    assert len(found.choices) == 2
    assert len(found.choices[0].logprobs.tokens) == 5
    chunks = client.completions.create(model="tiny", prompt=ids, temperature=0, max_tokens=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == found.choices[0].text


def test_models_are_listed_and_unknown_ones_refused(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "whet"
    with pytest.raises(openai.NotFoundError, match="known: tiny"):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("../../etc/passwd")


def test_a_context_that_is_too_long_says_both_lengths(client: Any) -> None:
    with pytest.raises(
        openai.BadRequestError, match=r"the prompt has 2[\d,]+ tokens, the model's context 4,096"
    ) as bad:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "word " * 6400}])
    assert bad.value.code == "context_length_exceeded"
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match=r"more than 4,096 tokens"):  # without encoding all of it
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 3_900_000}])


# Several adapters


@pytest.mark.parametrize("names", [("loud", "shy"), ("loud", "dora")], ids=["mixed", "in turns"])
def test_adapters_mixed_in_a_batch_answer_as_each_alone(
    base_folder: Path, adapters: dict[str, Path], names: tuple[str, ...]
) -> None:
    """DoRA cannot be mixed with others in one forward pass; the batch takes turns then."""
    references = [str(base_folder), *(str(adapters[name]) for name in names)]
    loaded = load_models_to_serve(references)
    assert loaded.adapters.mixed == ("dora" not in names)
    assert list(loaded.models) == ["base", *names]
    sampling = Sampling(max_new_tokens=10)
    alone = {
        name: chat_reply(load_inference_model(reference), sampling).text
        for name, reference in zip(loaded.models, references, strict=True)
    }
    assert len(set(alone.values())) == 3
    with running(make_serving_app(loaded, 32)) as url, openai.OpenAI(base_url=f"{url}v1", api_key="any") as client:

        def answer(name: str) -> str:
            got = client.chat.completions.create(model=name, messages=HELLO, temperature=0, max_tokens=10)
            return str(got.choices[0].message.content)

        asked = [*alone] * 4
        with ThreadPoolExecutor(len(asked)) as pool:
            assert list(pool.map(answer, asked)) == [alone[name] for name in asked]


def test_names_for_requests_are_short_where_they_are_unique(tmp_path: Path) -> None:
    for place in ("a/one", "b/one", "b/two"):
        (tmp_path / place).mkdir(parents=True)
    assert model_names([f"{tmp_path}/a/one", f"{tmp_path}/b/two/", "builtin:tiny", "Qwen/Qwen3-0.6B"]) == [
        "one", "two", "builtin:tiny", "Qwen/Qwen3-0.6B",
    ]  # fmt: skip
    assert model_names([f"{tmp_path}/a/one", f"{tmp_path}/b/one"]) == [f"{tmp_path}/a/one", f"{tmp_path}/b/one"]


@pytest.mark.slow
def test_runs_are_served_as_adapters_of_their_base(lora_run: Path, tmp_path: Path) -> None:
    """Their adapters are exported once. `test_adapters_mixed_in_a_batch_answer_as_each_alone` is the faster one."""
    run = Path(shutil.copytree(lora_run, tmp_path / "mine"))
    loaded = load_models_to_serve(["builtin:tiny", str(run)])
    (folder,) = (run / "exports").glob("adapter*")
    written = folder.stat().st_mtime_ns
    assert load_models_to_serve(["builtin:tiny", f"{run}@latest"]).adapters.mixed
    assert folder.stat().st_mtime_ns == written
    sampling = Sampling(max_new_tokens=6)
    expected = chat_reply(load_inference_model(str(folder)), sampling).text
    with running(make_serving_app(loaded, 8)) as url, openai.OpenAI(base_url=f"{url}v1", api_key="any") as client:
        got = client.chat.completions.create(model="mine", messages=HELLO, temperature=0, max_tokens=6)
    assert got.choices[0].message.content == expected
