"""Perforation of whole models: every kind of mask and cache gives the dense outputs when nothing is dropped, and what
cannot be sparse is dense and counted."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from dendritic_lab.perforation import (
    DistilledGate, Layout, Oracle, PooledTopK, WindowSink, attention_mass, gate_loss, keep_blocks, perforate,
    prune_cache)
from dendritic_lab.layers.blocks import visible_blocks, visible_tokens

from transformers import (
    AlbertConfig, AlbertModel, AttentionInterface, AttentionMaskInterface, BartConfig, BartForCausalLM, BartModel,
    BertConfig, BertForMaskedLM, BertModel, DebertaV2Config, DebertaV2Model, DeepseekV32Config,
    DeepseekV32ForCausalLM, DeepseekV4Config, DeepseekV4ForCausalLM, DistilBertConfig, DistilBertModel, DynamicCache,
    ElectraConfig, ElectraModel, FalconConfig, FalconForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, Gemma2Config,
    Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, Gemma4ForCausalLM, Gemma4TextConfig, GptOssConfig,
    GptOssForCausalLM, JetMoeConfig, JetMoeForCausalLM, Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM,
    MistralConfig, MistralForCausalLM, MptConfig, MptForCausalLM, Qwen2Config, Qwen2ForCausalLM, RobertaConfig,
    RobertaModel, StaticCache, T5Config, T5EncoderModel, T5ForConditionalGeneration, Trainer, TrainingArguments,
    XLNetConfig, XLNetModel, pipeline)
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import eager_attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:no call of attention")  # many tests are about such calls

SIZES = dict(vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32)
DECODER = dict(**SIZES, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=None)
ENCODERS = {
    "bert": lambda: BertModel(BertConfig(**SIZES)),
    "roberta": lambda: RobertaModel(RobertaConfig(**SIZES, pad_token_id=0)),
    "electra": lambda: ElectraModel(ElectraConfig(**SIZES, embedding_size=16)),
    "albert": lambda: AlbertModel(AlbertConfig(**SIZES, embedding_size=16)),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(
        vocab_size=60, dim=32, n_layers=2, n_heads=4, hidden_dim=32)),
}
DECODERS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**DECODER)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**DECODER, sliding_window=4096)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**DECODER)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, pad_token_id=0, eos_token_id=None)),
}
REFUSED = {
    "gemma2": ("soft cap", lambda: Gemma2ForCausalLM(Gemma2Config(**DECODER, head_dim=8, sliding_window=40))),
    "gpt_oss": ("learned sinks", lambda: GptOssForCausalLM(GptOssConfig(
        **DECODER, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=40))),
    "mistral": ("sliding window", lambda: MistralForCausalLM(MistralConfig(**DECODER, sliding_window=40))),
    "t5": ("position bias", lambda: T5EncoderModel(T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4))),
}
SMALL = dict(block_size=16, min_tokens=32)
ALL = 1e-9  # a sparsity that drops nothing, and still goes through selector and kernel
IDS = torch.randint(1, 60, (3, 90), generator=torch.Generator().manual_seed(0))
MASKS = {"none": None, "left": torch.ones(3, 90, dtype=torch.long), "right": torch.ones(3, 90, dtype=torch.long)}
MASKS["left"][1, :37] = MASKS["left"][2, :70] = 0
MASKS["right"][1, 37:] = MASKS["right"][2, 70:] = 0


def make(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for p in model.parameters(): nn.init.normal_(p, std=0.2)
    return model.eval()


def outputs(model: nn.Module, mask: torch.Tensor | None, **kwargs) -> torch.Tensor:
    "First output at the tokens that are no padding."
    ids = IDS if mask is None else IDS * mask
    out = model(input_ids=ids, attention_mask=mask, **kwargs)[0]
    return out.flatten(0, 1) if mask is None else out[mask > 0]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad(): yield


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", ENCODERS | DECODERS)
def test_outputs_are_dense_where_nothing_is_dropped(name, padding):
    model = make((ENCODERS | DECODERS)[name]())
    before, former = outputs(model, MASKS[padding]), model.config._attn_implementation
    with perforate(model, sparsity=ALL, **SMALL) as handle:
        torch.testing.assert_close(outputs(model, MASKS[padding]), before, atol=1e-4, rtol=1e-4)
        handle.set_sparsity(0.6)
        assert (outputs(model, MASKS[padding]) - before).abs().max() > 1e-3
    report = handle.report()
    assert (report.calls == report.sparse_calls).all() and report.calls.sum() == 4, report
    assert model.config._attn_implementation == former
    torch.testing.assert_close(outputs(model, MASKS[padding]), before, atol=0, rtol=0)


@pytest.mark.parametrize("padding", MASKS)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_dropped_blocks_are_those_of_a_mask(name, padding):
    "The window selector drops the same for every head, so the dense model can be given the same mask."
    model, mask, causal = make((ENCODERS | DECODERS)[name]()), MASKS[padding], name == "llama"
    spans = dict(starts=(0, 37, 70)) if padding == "left" else dict(ends=(90, 37, 70)) if padding == "right" else {}
    layout = Layout(90, 90, 16, causal, **spans)
    q = torch.zeros(3, 1, 90, 8)
    kept = keep_blocks(WindowSink()(q, q, layout), layout, 0.5)
    tokens = kept.repeat_interleave(16, 2)[:, :, :90].repeat_interleave(16, 3)[..., :90] & visible_tokens(layout, "cpu")
    positions = torch.arange(90).expand(3, -1)
    given = dict(position_ids=positions)
    ids = IDS if mask is None else IDS * mask
    wanted = model(input_ids=ids, attention_mask=tokens.expand(3, -1, -1, -1), **given)[0]
    with perforate(model, "window", 0.5, **SMALL):
        got = model(input_ids=ids, attention_mask=mask, **(given if causal and mask is not None else {}))[0]
    real = torch.ones(3, 90, dtype=torch.bool) if mask is None else mask > 0
    torch.testing.assert_close(got[real], wanted[real], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DECODERS)
def test_generates_the_same_tokens(name):
    model = make(DECODERS[name]())
    given = dict(input_ids=IDS * MASKS["left"], attention_mask=MASKS["left"], max_new_tokens=5, do_sample=False)
    ways = dict(plain={}, chunks=dict(prefill_chunk_size=33), static=dict(cache_implementation="static"),
                static_chunks=dict(cache_implementation="static", prefill_chunk_size=33), beams=dict(num_beams=2))
    before = {way: model.generate(**given, **extra) for way, extra in ways.items()}
    for sparsity, sparse in ((0.0, 0), (ALL, 9)):
        with perforate(model, sparsity=sparsity, **SMALL) as handle:
            for way, extra in ways.items(): assert torch.equal(model.generate(**given, **extra), before[way]), way
        report = handle.report()
        assert (report.sparse_calls == sparse).all() and report.why.str.contains("one query").all(), report
        assert (report.calls == report.sparse_calls + report.dense_calls).all()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_chunks_with_a_cache(cache):
    model = make(DECODERS["llama"]())
    whole = model(IDS).logits
    make_cache = (lambda: DynamicCache(config=model.config)) if cache == "dynamic" else (
        lambda: StaticCache(config=model.config, max_cache_len=128))
    with perforate(model, sparsity=ALL, **SMALL) as handle:
        past = make_cache()
        parts = [model(chunk, past_key_values=past).logits for chunk in IDS.split((40, 37, 13), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)
    assert handle.report().why.tolist() == ["fewer queries than a block: 1"] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sparse_is_dense_and_counted(name):
    reason, build = REFUSED[name]
    model = make(build())
    for padding in ("none", "left"):
        before, former = outputs(model, MASKS[padding]), model.config._attn_implementation
        with perforate(model, **SMALL) as handle:
            torch.testing.assert_close(outputs(model, MASKS[padding]), before, atol=1e-4, rtol=1e-4)
        report = handle.report()
        assert (report.sparse_calls == 0).all() and report.why.str.contains(f"{reason}: 1").all(), report
        assert model.config._attn_implementation == former


def test_a_window_that_holds_the_text_is_no_window():
    model = make(MistralForCausalLM(MistralConfig(**DECODER, sliding_window=90)))
    with perforate(model, **SMALL) as handle: model(IDS[:, :80]); model(IDS)
    assert handle.report().sparse_calls.tolist() in ([1, 1], [2, 2])


@pytest.mark.parametrize("way", ["module", "keyword"])
def test_causal_or_not_is_said_by_the_module_or_by_a_keyword(way):
    model = make(DECODERS["llama"]())
    causal, given = model(IDS).logits, dict(is_causal=False) if way == "keyword" else {}
    if way == "module":
        for layer in model.model.layers: layer.self_attn.is_causal = False
    before = model(IDS, **given).logits
    assert (before - causal).abs().max() > 1e-2
    with perforate(model, sparsity=ALL, **SMALL) as handle:
        torch.testing.assert_close(model(IDS, **given).logits, before, atol=1e-4, rtol=1e-4)
    assert handle.report().sparse_calls.tolist() == [1, 1]


def test_packed_texts_and_masks_of_ones_own():
    model = make(DECODERS["llama"]())
    packed = torch.cat([torch.arange(50), torch.arange(40)])[None]
    prefix = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].clone()
    prefix[..., :20] = True
    bias = torch.zeros(1, 1, 90, 90).masked_fill(torch.ones(90, 90).triu(1) > 0, -1e9) - torch.rand(90)
    for given in (dict(position_ids=packed), dict(attention_mask=prefix), dict(attention_mask=bias)):
        before = model(IDS[:1], use_cache=False, **given).logits
        with perforate(model, **SMALL) as handle:
            torch.testing.assert_close(model(IDS[:1], use_cache=False, **given).logits, before, atol=1e-5, rtol=1e-5)
        assert handle.report().why.str.contains("mask").all()


def test_cross_attention_stays_dense():
    model = make(BartModel(BartConfig(
        vocab_size=60, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32, pad_token_id=0)))
    before = model(input_ids=IDS, decoder_input_ids=IDS)[0]
    with perforate(model, sparsity=ALL, **SMALL) as handle:
        torch.testing.assert_close(model(input_ids=IDS, decoder_input_ids=IDS)[0], before, atol=1e-4, rtol=1e-4)
    report = handle.report()
    cross = report.name.str.contains("encoder_attn")
    assert (report.sparse_calls[~cross] == 1).all() and (report.why[cross] == "queries of another sequence: 1").all()


def test_attention_weights_can_be_seen():
    model = make(DECODERS["llama"]())
    model.set_attn_implementation("eager")
    before = model(IDS, output_attentions=True)
    with perforate(model, **SMALL) as handle: out = model(IDS, output_attentions=True); model(IDS)
    torch.testing.assert_close(out.attentions, before.attentions)
    assert handle.report().sparse_calls.tolist() == [1, 1]
    assert handle.report().why.tolist() == ["attention weights: 1"] * 2
    assert model.config._attn_implementation == "eager"


@torch.enable_grad()
def test_training():
    model = make(BertForMaskedLM(BertConfig(**SIZES)))
    model(IDS, labels=IDS).loss.backward()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    with perforate(model, sparsity=ALL, **SMALL) as handle:
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        for n, p in model.named_parameters():
            if n in before: torch.testing.assert_close(p.grad, before[n], atol=1e-5, rtol=1e-4)
        model.train()
        model(IDS, labels=IDS)
    assert handle.report().why.tolist() == ["dropout: 1"] * 2 and (handle.report().sparse_calls == 1).all()


@torch.enable_grad()
def test_trainer_and_checkpoints(tmp_path):
    model = make(DECODERS["llama"]())
    rows = [dict(input_ids=row, labels=row) for row in IDS]
    settings = TrainingArguments(
        tmp_path / "run", max_steps=2, per_device_train_batch_size=3, report_to=[], use_cpu=True, save_strategy="no",
        gradient_checkpointing=True, disable_tqdm=True, logging_strategy="no")
    with perforate(model, **SMALL) as handle:
        Trainer(model, settings, train_dataset=rows).train()
        assert (handle.report().sparse_calls >= 2).all() and (handle.report().dense_calls == 0).all()
        model.save_pretrained(tmp_path / "model")
        again = LlamaForCausalLM.from_pretrained(tmp_path / "model").eval()
        copied = copy.deepcopy(model).eval()
        calls = handle.report().calls.sum()
        dense = again(IDS).logits
        torch.testing.assert_close(copied(IDS).logits, dense, atol=1e-5, rtol=1e-5)  # a copy is dense
        assert handle.report().calls.sum() == calls
    assert again.config._attn_implementation == "sdpa"


def test_pipeline():
    from dendritic_lab.models.pretrained_lm import RANDOM, load_decoder
    model, tokenizer = load_decoder(RANDOM)
    write = pipeline("text-generation", model=model.eval(), tokenizer=tokenizer)
    given = dict(max_new_tokens=3, do_sample=False, return_full_text=False)
    texts = ["A dendrite is a branch. " * 5, "And this is a shorter text, with more than one block. "]
    before = write(texts, batch_size=2, **given)
    with perforate(model, sparsity=ALL, **SMALL) as handle: assert write(texts, batch_size=2, **given) == before
    assert (handle.report().sparse_calls == 1).all()


def test_two_models_at_once_even_with_one_configuration():
    config = LlamaConfig(**DECODER)
    first, second, third = (make(LlamaForCausalLM(config)) for _ in range(3))
    with perforate(first, **SMALL) as a:
        with perforate(second, **SMALL) as b:
            first(IDS); second(IDS); second(IDS); dense = third(IDS).logits
            assert a.report().calls.tolist() == [1, 1] and b.report().calls.tolist() == [2, 2]
        second(IDS); first(IDS)
    assert a.report().calls.tolist() == [2, 2] and b.report().calls.tolist() == [2, 2]
    assert config._attn_implementation == "sdpa"
    assert torch.equal(third(IDS).logits, dense)


def test_restored_in_any_order_and_after_an_error():
    model = make(DECODERS["llama"]())
    handle = perforate(model, **SMALL)
    with pytest.raises(ValueError, match="perforated already"): perforate(model)
    with pytest.raises(ValueError, match="perforated already"): perforate(model.model)
    pruning = prune_cache(model, window=8)
    handle.restore(); handle.restore(); pruning.restore()
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError, match="stop"), perforate(model): raise RuntimeError("stop")
    for wrong in (dict(sparsity=1), dict(sparsity="0.5"), dict(sparsity=[0.5]), dict(selector="x"),
                  dict(selector=[PooledTopK()]), dict(dense_layers=[5]), dict(block_size=0), dict(block_size=True)):
        with pytest.raises(ValueError): perforate(model, **wrong)
    assert model.config._attn_implementation == "sdpa"
    perforate(model).restore()


@pytest.mark.parametrize("build,named", [
    (lambda: DebertaV2Model(DebertaV2Config(**SIZES)), "DebertaV2Attention"),
    (lambda: XLNetModel(XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=4, d_inner=32)), "XLNet"),
    (lambda: nn.Linear(2, 2), "Linear")])
def test_what_is_not_reached_is_named(build, named):
    with pytest.raises(ValueError, match=named): perforate(build())


@torch.enable_grad()
def test_a_gate_learns_after_the_same_sizes_were_used_for_inference():
    layout = Layout(90, 90, 16, causal=True, starts=(0, 20))
    q, k, gate = torch.randn(2, 4, 90, 8), torch.randn(2, 2, 90, 8), DistilledGate(4, 2, 8)
    with torch.inference_mode(): keep_blocks(gate(q, k, layout), layout, 0.5)
    scores = gate(q, k, layout)
    gate_loss(scores, attention_mass(q, k, layout)).backward()
    assert keep_blocks(scores, layout, 0.5).any()
    assert all(p.grad.abs().sum() > 0 for p in gate.parameters())


def test_layers_by_tensor_and_texts_without_a_token():
    model = make(DECODERS["llama"]())
    with perforate(model, dense_layers=torch.tensor([0]), **SMALL) as handle: model(IDS)
    assert handle.report().why.tolist() == ["dense layer: 1", ""]
    selectors = nn.ModuleList([PooledTopK(), WindowSink()])  # one for each layer
    with perforate(model, selectors, **SMALL) as handle: model(IDS)
    assert handle.report().sparse_calls.tolist() == [1, 1]
    with perforate(model, **SMALL) as handle: model(IDS, attention_mask=torch.zeros_like(IDS))
    assert handle.report().dropped.isna().all()


def test_rows_do_not_starve_each_other():
    torch.manual_seed(0)
    layout = Layout(512, 512, 16, causal=True)
    scores = torch.randn(2, 3, 32, 32)
    offsets = 5 * torch.randn(2, 3, 32, 1)
    kept = keep_blocks(scores, layout, 0.7)
    assert torch.equal(kept, keep_blocks(scores + offsets, layout, 0.7))
    seen, _ = visible_blocks(layout, scores.device)
    assert abs(1 - kept.sum() / seen.expand_as(kept).sum() - 0.7) < 0.01
    assert kept.sum(-1)[..., 16:].aminmax().max - kept.sum(-1)[..., 16:].aminmax().min <= 1


@pytest.mark.parametrize("offset,queries", [(0, 90), (37, 53), (64, 20)])
@pytest.mark.parametrize("starts", [None, (0, 50)])
def test_layouts_agree_with_tokens(offset, queries, starts):
    layout = Layout(queries, 90, 16, True, offset, starts)
    tokens = visible_tokens(layout, torch.device("cpu"))
    padded = nn.functional.pad(tokens, (0, -90 % 16, 0, -queries % 16))
    blocks = padded.unflatten(2, (-1, 16)).unflatten(4, (-1, 16)).any(5).any(3)
    seen, forced = visible_blocks(layout, torch.device("cpu"))
    assert torch.equal(blocks, seen.expand_as(blocks)) and not (forced & ~seen).any()
    assert torch.equal(forced.any(-1), seen.any(-1))
    q, k = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 90, 8)
    mass = attention_mass(q, k, layout)
    rows = seen.any(-1).expand(mass.shape[:3])
    torch.testing.assert_close(mass.sum(-1)[rows], torch.ones(int(rows.sum())))
    torch.testing.assert_close(Oracle()(q, k, layout), mass)


def test_pruned_caches_keep_positions_and_padding():
    model = make(DECODERS["llama"]())
    given = dict(input_ids=IDS * MASKS["left"], attention_mask=MASKS["left"], max_new_tokens=6, do_sample=False)
    before = model.generate(**given)
    for method in ("recent", "snap"):
        with prune_cache(model, keep=1.0, method=method, window=8): assert torch.equal(model.generate(**given), before)
        with prune_cache(model, keep=0.6, method=method, window=8) as pruning:  # 54 of 90: all of the shorter texts
            after = model.generate(**given)
            model.generate(**given, num_beams=2)
        assert torch.equal(after[1:], before[1:]), method
        assert pruning.report().kept.tolist() == [108] * 2  # of two prompts
        assert (pruning.report().bytes_after < 0.61 * pruning.report().bytes_before).all()


@pytest.mark.parametrize("method", ["recent", "snap"])
def test_a_mask_may_be_given_by_its_place(method):
    model, ids = make(DECODERS["llama"]()), IDS * MASKS["left"]
    with prune_cache(model, keep=0.3, method=method, window=8):
        named = model(input_ids=ids, attention_mask=MASKS["left"]).past_key_values
        placed = model(ids, MASKS["left"]).past_key_values
    for a, b in zip(named.layers, placed.layers): assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.mark.parametrize("take", [perforate, prune_cache])
def test_an_attention_function_of_ones_own_is_not_replaced(take):
    model = make(DECODERS["llama"]())
    doubled = lambda *args, **kwargs: (2 * eager_attention_forward(*args, **kwargs)[0], None)
    AttentionInterface.register("doubled", doubled)
    AttentionMaskInterface.register("doubled", eager_mask)
    try:
        model.set_attn_implementation("doubled")
        before = outputs(model, None)
        with pytest.raises(ValueError, match="computes its attention with 'doubled'"): take(model)
        torch.testing.assert_close(outputs(model, None), before)
        model.set_attn_implementation("sdpa")
        take(model).restore()
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface): interface._global_mapping.pop("doubled")


def test_snap_keeps_what_the_last_queries_read():
    model = make(DECODERS["llama"]())
    model.set_attn_implementation("eager")
    with prune_cache(model, keep=0.3, window=8, kernel_size=1) as pruning:
        out = model(IDS, output_attentions=True)
    number = pruning.report().kept[0]
    full = model(IDS).past_key_values
    for i, weights in enumerate(out.attentions):
        votes = weights[:, :, -8:, :-8].mean(2).unflatten(1, (2, -1)).mean(2)
        best = torch.cat([votes.topk(number - 8).indices.sort().values, torch.arange(82, 90).expand(3, 2, -1)], -1)
        wanted = full.layers[i].keys.gather(2, best[..., None].expand(-1, -1, -1, 8))
        torch.testing.assert_close(out.past_key_values.layers[i].keys, wanted)


def test_perforation_and_pruning_together():
    model = make(DECODERS["qwen2"]())
    makers = (lambda: perforate(model, sparsity=ALL, **SMALL), lambda: prune_cache(model, keep=0.5, window=8))
    with makers[1](): alone = model.generate(IDS, max_new_tokens=5, do_sample=False)
    for order in (makers, makers[::-1]):
        with ExitStack() as stack:
            handles = [stack.enter_context(make_one()) for make_one in order]
            assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), alone)
        perforation, pruning = handles if order is makers else handles[::-1]
        assert perforation.report().sparse_calls.tolist() == [1, 1] and pruning.report().kept.tolist() == [45, 45]
    assert model.config._attn_implementation == "sdpa"


def test_next_turns_are_pruned_too():
    model = make(DECODERS["llama"]())
    with prune_cache(model, keep=0.5, window=8) as pruning:
        cache = model(IDS[:, :60]).past_key_values
        for token in IDS[:, 60:64].split(1, 1): model(token, past_key_values=cache)
        assert (cache.get_seq_length(), cache.layers[1].keys.shape[2]) == (64, 34)
        model(IDS[:, 64:], past_key_values=cache)
    assert pruning.report().kept.tolist() == [75, 75] and cache.get_seq_length() == 90


def test_a_mask_that_a_model_adds_to():
    model = make(DeepseekV4ForCausalLM(DeepseekV4Config(**DECODER, head_dim=8, moe_intermediate_size=16, q_lora_rank=16,
                                                        n_routed_experts=4, num_experts_per_tok=2, sliding_window=20)))
    before = model(IDS).logits
    with perforate(model, **SMALL) as handle: torch.testing.assert_close(model(IDS).logits, before)
    assert set(handle.report().why) == {"learned sinks: 1"}


NAMED = {  # models that compare the name of their attention with others
    "keys of its own choice": (lambda: DeepseekV32ForCausalLM(DeepseekV32Config(
        **DECODER | dict(num_key_value_heads=4), moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
        index_n_heads=2, index_head_dim=16, index_topk=8, first_k_dense_replace=2)), {}),
    "queries that are cut": (lambda: Gemma4ForCausalLM(Gemma4TextConfig(
        **DECODER | dict(num_hidden_layers=4), head_dim=8, global_head_dim=8, vocab_size_per_layer_input=60,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2, sliding_window=2048,
        layer_types=["sliding_attention", "full_attention"] * 2)), dict(logits_to_keep=8))}


@pytest.mark.parametrize("former", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMED)
def test_a_model_that_compares_names_goes_its_way(name, former):
    build, given = NAMED[name]
    model = make(build())
    model.set_attn_implementation(former)
    before = model(IDS, **given).logits
    for settings in ({}, dict(sparsity=ALL, **SMALL)):
        with perforate(model, **settings):
            torch.testing.assert_close(model(IDS, **given).logits, before, atol=1e-4, rtol=1e-4)
            assert copy.deepcopy(model.config)._attn_implementation == former
    with prune_cache(model, keep=1.0): torch.testing.assert_close(model(IDS, **given).logits, before)
    assert model.config._attn_implementation == former


def test_autocast():
    model = make(DECODERS["llama"]())
    with torch.autocast("cpu", torch.bfloat16):
        before = model(IDS).logits
        with perforate(model, sparsity=ALL, **SMALL) as handle: after = model(IDS).logits
    assert (handle.report().sparse_calls == 1).all() and after.dtype == before.dtype
    torch.testing.assert_close(after, before, atol=0.1, rtol=0.1)


def test_the_choice_of_another_attention_meanwhile_stays():
    model = make(DECODERS["llama"]())
    with pytest.warns(UserWarning, match="became 'eager' meanwhile"), perforate(model, **SMALL):
        model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"


def test_a_mask_may_change_between_calls():
    model = make(DECODERS["llama"]())
    mask = torch.ones(90, 90, dtype=torch.bool).tril()[None, None].clone()
    with torch.inference_mode(), perforate(model, sparsity=ALL, **SMALL):
        mask = mask.clone()
        model(IDS[:1], attention_mask=mask, use_cache=False)
        mask[..., :20] = False
        got = model(IDS[:1], attention_mask=mask, use_cache=False).logits[:, 20:]
    wanted = model(IDS[:1], attention_mask=mask.clone(), use_cache=False).logits[:, 20:]
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("take", [lambda m: perforate(m, **SMALL), lambda m: prune_cache(m, keep=0.25, window=8)])
def test_copies_are_not_changed_and_a_handle_works_once(take):
    model = make(DECODERS["llama"]())
    with take(model) as handle: copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))  # noqa: S301
    for copied in copies:
        assert torch.equal(copied(IDS).logits, model(IDS).logits)
        assert copied(IDS).past_key_values.layers[0].keys.shape[2] == 90
        take(copied).restore()
    assert "restored" in repr(copy.copy(handle))
    with pytest.raises(RuntimeError, match="restored"), handle: pass


@pytest.mark.parametrize("method", ["recent", "keydiff", "snap", "gate"])
def test_prompts_about_as_long_as_the_window(method):
    model = make(DECODERS["llama"]())
    gates = [DistilledGate(4, 2, 8, pool_size=4) for _ in range(2)] if method == "gate" else None
    for tokens in (31, 32, 33, 40):
        with prune_cache(model, 0.5, method, gate=gates) as pruning: model(IDS[:, :tokens])
        assert bool(pruning.counts) == (tokens == 40), pruning


def test_what_is_not_pruned_is_refused_or_counted():
    alibi = dict(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    sizes = dict(vocab_size=60, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    for build in (lambda: MptForCausalLM(MptConfig(vocab_size=60, d_model=32, n_layers=1, n_heads=4)),
                  lambda: FalconForCausalLM(FalconConfig(**alibi, alibi=True))):
        with pytest.raises(ValueError, match="not reached"): prune_cache(build(), method="recent")
    for build in (ENCODERS["bert"], lambda: T5ForConditionalGeneration(T5Config(**sizes)), lambda: BartModel(BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4))):
        with pytest.raises(ValueError, match="expected a decoder"): prune_cache(build(), method="recent")
    model, given = make(DECODERS["llama"]()), dict(max_new_tokens=2, do_sample=False)
    with prune_cache(model) as pruning:
        with pytest.raises(ValueError, match="pruned already"): prune_cache(model)
        model.generate(IDS, prefill_chunk_size=24, **given)
        model(IDS, use_cache=False)
    assert pruning.report().why.tolist() == ["fewer tokens than the window: 4; no cache: 1"]
    with prune_cache(model) as pruning: model(IDS, use_cache=False)
    assert pruning.skipped == {"no cache": 1} and "not pruned: no cache (1)" in repr(pruning)
    gemma = make(Gemma3ForCausalLM(Gemma3TextConfig(**DECODER, head_dim=8, sliding_window=16)))
    causal = torch.ones(3, 1, 90, 90, dtype=torch.bool).tril()
    masks = dict.fromkeys(("full_attention", "sliding_attention"), causal)
    with prune_cache(gemma, window=8) as pruning: gemma(IDS, attention_mask=masks)
    assert pruning.skipped.total() == 1


def test_layers_that_hold_nothing_and_keys_that_are_copied():
    bart = make(BartForCausalLM(BartConfig(vocab_size=60, d_model=32, encoder_layers=3, decoder_layers=1,
                                           decoder_attention_heads=4, decoder_ffn_dim=32, pad_token_id=0)))
    with prune_cache(bart, keep=0.25, window=8) as pruning: bart(IDS)
    assert pruning.report().kept.tolist() == [23]
    jet = make(JetMoeForCausalLM(JetMoeConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, kv_channels=8)))
    with prune_cache(jet, window=8) as pruning: jet(IDS)
    assert pruning.skipped == {"attention has other keys than the cache": 1}


def test_a_wrapped_decoder_is_pruned():
    from peft import LoraConfig, get_peft_model
    model = make(DECODERS["llama"]())
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with prune_cache(wrapped, keep=0.25, window=8) as pruning:
        wrapped.generate(input_ids=IDS, max_new_tokens=2, do_sample=False)
        assert wrapped(IDS, return_dict=False)[1].layers[0].keys.shape[2] == 23
    assert pruning.report().prunings.tolist() == [2, 2]


def test_sliding_windows_are_known_by_the_configuration():
    model = make(MistralForCausalLM(MistralConfig(**DECODER, sliding_window=24)))
    with prune_cache(model, keep=0.2, window=8) as pruning:
        cache = model(IDS, past_key_values=DynamicCache()).past_key_values
    assert cache.layers[0].keys.shape[2] == 90 and pruning.skipped == {"no layer without a sliding window": 1}


def test_gates_belong_to_attention_modules():
    model = make(Lfm2ForCausalLM(Lfm2Config(**DECODER | dict(num_hidden_layers=4),
                                            layer_types=["conv", "full_attention"] * 2)))
    gates = [DistilledGate(4, 2, 8) for _ in range(2)]
    with prune_cache(model, keep=0.25, method="gate", gate=gates, window=8) as pruning: model(IDS)
    assert pruning.report().kept.tolist() == [23, 23]


def test_only_what_is_whole_can_be_cropped():
    model = make(DECODERS["llama"]())
    with prune_cache(model, keep=0.25, window=8): cache = model(IDS).past_key_values
    for token in IDS[:, :3].split(1, 1): model(token, past_key_values=cache)
    with pytest.raises(ValueError, match="the last 11 tokens can be removed, asked for 12"): cache.crop(-12)
    cache.crop(-11)
    assert (cache.get_seq_length(), cache.layers[0].keys.shape[2]) == (82, 15)


def test_threads_do_not_share_votes():
    model = make(DECODERS["llama"]())
    texts = [IDS[:, :n] for n in (90, 80, 70)] * 6

    @torch.no_grad()
    def keys(ids): return model(ids).past_key_values.layers[1].keys
    with prune_cache(model, keep=0.25, window=8):
        wanted = [keys(ids) for ids in texts]
        with ThreadPoolExecutor(3) as pool: got = [*pool.map(keys, texts)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))
