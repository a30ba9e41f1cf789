"""Document attention on CUDA: kernels against the definition, isolation of documents, and torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from whet.compat.flash_attention import why_not_flash_attention_4
from whet.model import attention
from whet.model.attention import (
    AttentionSpec,
    document_kwargs,
    eager_attention_forward,
    fa4_attention_forward,
    flex_attention_forward,
    sdpa_attention_forward,
    short_attention_forward,
    varlen_attention_forward,
)
from whet.model.loss.loss_model import LossModel

pytestmark = pytest.mark.gpu
needs_fa4 = pytest.mark.skipif(why_not_flash_attention_4() is not None, reason=f"fa4 {why_not_flash_attention_4()}")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


EDGES = (0, 5, 130, 131, 512, 900, 1000, 1000)  # the last document is empty, as padding makes it
LENGTH = EDGES[-1]  # and the row ends inside a block


def _documents(edges=EDGES):
    return document_kwargs(torch.tensor(edges, dtype=torch.int32, device="cuda"), edges[-1], edges)["documents"]


def _random(*shape):
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, device="cuda", dtype=torch.float64, generator=generator)


def _states(width=64, value_width=64, heads=8, key_heads=2):
    """What bf16 can hold, so that all back-ends get the same numbers."""
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    return [_random(1, heads, LENGTH, size).bfloat16() for heads, size in shapes]


def _gradients(backend, states, dtype, window=None, softcap=None, sinks=None, edges=EDGES):
    inputs = [state.to(dtype, copy=True).requires_grad_() for state in states]  # shared, gradients would add up
    if sinks is not None:
        sinks = sinks.detach().to(torch.promote_types(dtype, torch.float32), copy=True).requires_grad_()
    out = backend(*inputs, AttentionSpec(0.125, window, softcap, sinks), _documents(edges))
    out.double().pow(2).sum().backward()
    found = [out.detach().double(), *(state.grad.double() for state in inputs)]
    return found if sinks is None else [*found, sinks.grad.double()]


def _compare(backend, states, dtype=torch.bfloat16, **spec):
    """As close to the definition as torch's own attention is, twice over. Of heads that are no multiple of 8 wide torch
    computes in fp32, so a step of bf16 is spared; a gradient of nothing need not be nothing to the last bit."""
    skip_mask = 2**-8 if states[0].shape[-1] % 8 else 1e-6
    truth = _gradients(eager_attention_forward, states, torch.float64, **spec)
    ours = _gradients(backend, states, dtype, **spec)
    reference = _gradients(sdpa_attention_forward, states, dtype, **spec)
    for exact, kernel, sdpa in zip(truth, ours, reference, strict=True):
        assert (kernel - exact).abs().max() <= 2 * (sdpa - exact).abs().max() + skip_mask * exact.abs().max() + 1e-5


@pytest.mark.parametrize("window", [None, 2, 64, 300])
@pytest.mark.parametrize("widths", [(64, 64), (64, 40), (20, 20)])
def test_varlen_is_as_close_to_the_definition_as_sdpa_is(window, widths):
    _compare(varlen_attention_forward, _states(*widths), window=window)


@pytest.mark.parametrize("window", [None, 1, 2, 64, 300])
@pytest.mark.parametrize("widths", [(64, 64), (64, 40), (20, 20), (80, 80), (128, 128), (192, 128), (256, 256)])
def test_short_is_as_close_to_the_definition_as_sdpa_is(window, widths):
    _compare(short_attention_forward, _states(*widths), window=window)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (14, 2), (71, 1)])
@pytest.mark.parametrize("width", [64, 80, 128])
def test_short_takes_any_number_of_heads_that_share_a_key(heads, width):
    _compare(short_attention_forward, _states(width, width, *heads), window=100)


@pytest.mark.parametrize(
    "edges", [tuple(range(LENGTH + 1)), (0, LENGTH), (0, 1, 2, 999, LENGTH, LENGTH), (0, 0, 128, 256, LENGTH)]
)
def test_short_takes_documents_of_any_length(edges):
    _compare(short_attention_forward, _states(), edges=edges)


def test_short_computes_in_fp16():
    _compare(short_attention_forward, [state.half() for state in _states()], dtype=torch.float16)


def test_short_reads_states_of_any_strides():
    states = _states(128, 128)
    by_token = [state.transpose(1, 2).contiguous().transpose(1, 2) for state in states]
    by_number = [state.transpose(2, 3).contiguous().transpose(2, 3) for state in states]
    wanted = _gradients(short_attention_forward, states, torch.bfloat16)
    for others in (by_token, by_number):
        for ours, exact in zip(_gradients(short_attention_forward, others, torch.bfloat16), wanted, strict=True):
            assert torch.equal(ours, exact)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("heads", [(8, 2), (9, 3)])  # three that share leave rows of a tile over
def test_short_is_the_same_bit_by_bit_from_run_to_run(window, heads):
    states = _states(128, 128, *heads)
    first = _gradients(short_attention_forward, states, torch.bfloat16, window=window)
    for _ in range(20):
        for again, before in zip(
            _gradients(short_attention_forward, states, torch.bfloat16, window=window), first, strict=True
        ):
            assert torch.equal(again, before)


@pytest.mark.parametrize("kernel", ["forward", "backward_query", "backward_key_value"])
@pytest.mark.parametrize("width", [64, 128])
def test_short_skips_the_mask_only_where_all_pairs_are_visible(kernel, width, monkeypatch):
    from whet.model.attention import short_kernels

    for window in (None, 200):
        tile = short_kernels.ATTENTION_TILES[kernel][width]
        monkeypatch.setitem(short_kernels.ATTENTION_TILES[kernel], width, tile._replace(skip_mask=not tile.skip_mask))
        _compare(short_attention_forward, _states(width, width), window=window)
        _compare(short_attention_forward, _states(width, width), window=window, edges=(0, LENGTH))
        monkeypatch.undo()


@needs_fa4
@pytest.mark.parametrize("window", [None, 2, 64, 300])
@pytest.mark.parametrize("widths", [(64, 64), (64, 40), (128, 128)])
def test_fa4_is_as_close_to_the_definition_as_sdpa_is(window, widths):
    _compare(fa4_attention_forward, _states(*widths), window=window)


@needs_fa4
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 2), (14, 2)])
def test_fa4_takes_any_number_of_heads_that_share_a_key(heads):
    _compare(fa4_attention_forward, _states(128, 128, *heads))


@needs_fa4
@pytest.mark.parametrize("edges", [(0, LENGTH), (0, 1, 2, 999, LENGTH, LENGTH), (0, 0, 128, 256, LENGTH)])
def test_fa4_takes_documents_of_any_length(edges):
    _compare(fa4_attention_forward, _states(), edges=edges)


@needs_fa4
def test_a_compiled_layer_with_fa4_is_one_graph():
    states = [state.detach().requires_grad_() for state in _states()]
    documents = _documents((0, 100, LENGTH))
    spec = AttentionSpec(states[0].shape[-1] ** -0.5)

    def layer(query, key, value):
        return fa4_attention_forward(query * 2, key, value, spec, documents).square().sum()

    wanted = torch.autograd.grad(layer(*states), states)
    found = torch.autograd.grad(torch.compile(layer, fullgraph=True)(*states), states)
    for ours, eager in zip(found, wanted, strict=True):
        assert (ours - eager).abs().max() <= 2**-6 * eager.abs().max()


def test_short_uses_64_bit_offsets():
    """Keys and values that lie further behind one another than an int32 counts, heads too."""
    room = torch.zeros(3 * 2**30, device="cuda", dtype=torch.bfloat16)
    shape, steps = (1, 2, LENGTH, 64), (0, 2**31 - 2**20, 1024, 1)
    query = torch.as_strided(room, shape, steps).copy_(_states(64, 64, 2, 1)[0])
    key, value = _states(64, 64, 1, 1)[1:]
    wanted = short_attention_forward(query.contiguous(), key, value, AttentionSpec(0.125), _documents())
    assert torch.equal(short_attention_forward(query, key, value, AttentionSpec(0.125), _documents()), wanted)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 2, 64, 300])
def test_flex_is_as_close_to_the_definition_as_sdpa_is(window, sinks, softcap):
    _compare(flex_attention_forward, _states(), window=window, softcap=softcap, sinks=_random(8) if sinks else None)


@pytest.mark.parametrize("widths", [(64, 32), (8, 8), (80, 80)])
def test_flex_takes_other_head_widths(widths):
    _compare(flex_attention_forward, _states(*widths), window=64, softcap=2.0, sinks=_random(8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_flex_computes_in_other_dtypes(dtype):
    states, spec = _states(), {"window": 64, "softcap": 2.0, "sinks": _random(8)}
    truth = _gradients(eager_attention_forward, states, torch.float64, **spec)
    ours = _gradients(flex_attention_forward, states, dtype, **spec)
    for exact, kernel in zip(truth, ours, strict=True):
        assert (kernel - exact).abs().max() <= 5e-3 * exact.abs().max()


@pytest.mark.parametrize(
    ("backend", "spec"),
    [
        (varlen_attention_forward, AttentionSpec(0.125)),
        (varlen_attention_forward, AttentionSpec(0.125, window=64)),
        (short_attention_forward, AttentionSpec(0.125)),
        (short_attention_forward, AttentionSpec(0.125, window=64)),
        (flex_attention_forward, AttentionSpec(0.125)),
        (flex_attention_forward, AttentionSpec(0.125, window=64, softcap=2.0)),
        (sdpa_attention_forward, AttentionSpec(0.125, window=64)),
    ],
)
def test_documents_do_not_influence_each_other(backend, spec):
    states = _states()
    before = backend(*states, spec, _documents())
    changed = [state.clone() for state in states]
    for state in changed:
        state[:, :, 131:512] += 1
    after = backend(*changed, spec, _documents())
    assert torch.equal(before[:, :131], after[:, :131])
    assert torch.equal(before[:, 512:], after[:, 512:])
    assert not torch.equal(before[:, 131:512], after[:, 131:512])


@pytest.mark.parametrize("backend", [varlen_attention_forward, short_attention_forward, flex_attention_forward])
def test_gradients_stay_within_a_document(backend):
    states = [state.requires_grad_() for state in _states()]
    backend(*states, AttentionSpec(0.125, window=64), _documents())[:, 131:512].double().pow(2).sum().backward()
    for state in states:
        assert state.grad[:, :, :131].abs().max() == 0
        assert state.grad[:, :, 512:].abs().max() == 0
        assert state.grad[:, :, 131:512].abs().max() > 0


def test_flex_takes_rows_of_many_lengths():
    for length in range(200, 1000, 77):  # more than the compiler would compile for one by one
        states = [state[:, :, :length] for state in _states()]
        documents = _documents((0, 150, length))
        ours = flex_attention_forward(*states, AttentionSpec(0.125, window=64), documents).double()
        exact = eager_attention_forward(
            *(state.double() for state in states), AttentionSpec(0.125, window=64), documents
        )
        assert (ours - exact).abs().max() <= 0.02 * exact.abs().max()


def test_a_model_with_sinks_uses_flex(make_model, make_documents, pack):
    settings = {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2}
    model = make_model("GptOss", dtype=torch.bfloat16, **settings).cuda()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    assert (
        attention.choose_backend("auto", torch.device("cuda"), torch.bfloat16, attention.inspect_attention(model))
        == "flex"
    )
    batch, hidden = _batch(pack, make_documents, (3, 44, 1)), []
    for backend in ("eager", "flex"):
        attention.install_backend(model, backend)
        hidden.append(_hidden(model, batch))
    assert (hidden[1] - hidden[0]).abs().max() <= 0.05 * hidden[0].abs().max()
    hidden[1].float().pow(2).sum().backward()
    assert all(layer.self_attn.sinks.grad.abs().max() > 0 for layer in model.model.layers)


def _batch(pack, make_documents, lengths):
    batch = pack(make_documents(*lengths))
    for name in ("tokens", "positions", "cu_seqlens"):
        setattr(batch, name, getattr(batch, name).cuda())
    return batch


def _hidden(model, batch):
    with torch.autocast("cuda", torch.bfloat16):
        return LossModel(model).hidden(batch.tokens, batch.positions, batch.cu_seqlens, 48, batch.cu_seqlens_host)


@pytest.mark.parametrize(
    ("architecture", "settings", "backend"),
    [
        ("Llama", {}, "varlen"),
        ("Mistral", {"sliding_window": 6}, "varlen"),
        ("Llama", {}, "short"),
        ("Mistral", {"sliding_window": 6}, "short"),
        ("Gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 0.5}, "flex"),
    ],
)
def test_layers_compile_once_for_all_document_layouts(
    architecture, settings, backend, make_model, make_documents, pack
):
    model = make_model(architecture, dtype=torch.float32, **settings).cuda()
    wanted = "auto" if backend in ("short", "flex") else backend
    assert (
        attention.choose_backend(wanted, torch.device("cuda"), torch.bfloat16, attention.inspect_attention(model))
        == backend
    )
    batches = [_batch(pack, make_documents, lengths) for lengths in ((3, 44, 1), (16, 16, 16), (1, 2, 45), (40, 7, 1))]
    attention.install_backend(model, "eager")
    wanted = [_hidden(model, batch).detach() for batch in batches]
    attention.install_backend(model, backend)
    counter = CompileCounterWithBackend("inductor")
    for layer in model.model.layers:
        layer.compile(backend=counter, dynamic=False)
    frames = []
    for batch, exact in zip(batches, wanted, strict=True):
        hidden = _hidden(model, batch)
        hidden.float().sum().backward()
        frames.append(counter.frame_count)
        assert (hidden - exact).abs().max() <= 0.05 * exact.abs().max()
    assert frames[0] > 0
    assert frames == [frames[0]] * len(frames)
