"""Pruning under hypothesis: exact shares whatever the scores, shrunken models that say what masked ones say."""

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dendritic_lab.data.mixtures import mix
from dendritic_lab.models.dendritic_lm import DOCUMENT, REPAIRED, DendriticLMConfig, DendriticLMForCausalLM
from dendritic_lab.pruning.structured import list_units, mask_units, shrink, taylor_unit_scores, weakest_units
from dendritic_lab.pruning.unstructured import (
    active_weights, apply_masks, hold_masks, magnitude_scores, make_masks, prunable_weights, wanda_scores)

from transformers import (
    BertConfig, BertForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM)

SIZES = dict(vocab_size=30, hidden_size=24, num_hidden_layers=2, max_position_embeddings=32)
SMALL = dict(**SIZES, num_attention_heads=4, intermediate_size=6, pad_token_id=0)
LAYOUT = dict(branches=[[4, 3, 4], [2, 2]], soma_expansion=1, num_passes=2)
MODELS = {
    "dendritic": lambda: DendriticLMForCausalLM(DendriticLMConfig(**DOCUMENT | REPAIRED | SIZES | LAYOUT)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
}
IDS = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(0))


def make(name: str, seed: int = 0):
    torch.manual_seed(seed)
    model = MODELS[name]().double().eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=0.3)
    return model


SHAPES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=4)
SCOPES = st.sampled_from(["global", "layer", "row"])


@settings(deadline=None, max_examples=80, print_blob=True)
@given(SHAPES, st.floats(0, 1), st.integers(1, 4), SCOPES, st.integers(0, 2**31))
def test_the_share_is_exact_and_no_kept_score_is_below_a_dropped_one(shapes, share, values, scope, seed):
    generator = torch.Generator().manual_seed(seed)
    few = lambda shape: torch.randint(values, shape, generator=generator).float()  # few values: many ties
    scores = {str(i): few(shape) for i, shape in enumerate(shapes)}
    masks = make_masks(scores, share, scope)
    pairs = [(scores[n], masks[n]) for n in scores]
    if scope == "global": pairs = [tuple(torch.cat([part.flatten() for part in side]) for side in zip(*pairs))]
    if scope == "row": pairs = [(s[i], m[i]) for s, m in pairs for i in range(len(s))]
    for s, m in pairs:
        assert (~m).sum() == round(share * m.numel())
        if m.any() and not m.all(): assert s[~m].max() <= s[m].min()


@pytest.mark.parametrize("name", MODELS)
@settings(deadline=None, max_examples=12, print_blob=True)
@given(st.floats(0, 1), st.integers(0, 2**31))
def test_shrunken_models_say_what_masked_ones_say(name, share, seed):
    model = make(name)
    units = [u for u in list_units(model) if random.Random(f"{seed}{u}").random() < share]
    masked = copy.deepcopy(model)
    mask_units(masked, units)
    small = shrink(model, units)
    with torch.no_grad(): torch.testing.assert_close(small(IDS).logits, masked(IDS).logits)
    assert active_weights(small).prunable == active_weights(masked).prunable


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_is_scored_masked_and_shrunken(name):
    model = make(name).bfloat16()
    batch = dict(input_ids=IDS, labels=IDS if name != "bert" else torch.tensor([0, 1]))
    units = weakest_units(taylor_unit_scores(model, [batch]), 0.4, "layer")
    small = shrink(model, units)
    assert small.dtype == torch.bfloat16 and small(IDS).logits.isfinite().all()
    assert len(list_units(small)) <= len(list_units(model)) - len(units)
    apply_masks(model, make_masks(wanda_scores(model, [batch]), 0.5, "row"))
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_no_optimizer_moves_a_pruned_weight(name):
    model, other = make(name), make(name, seed=1)
    masks = make_masks(magnitude_scores(model), 0.6)
    batch = dict(input_ids=IDS, labels=IDS if name != "bert" else torch.tensor([0, 1]))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with hold_masks(model, masks) as held:
        sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for p in model.parameters(): sgd.state[p] = {"momentum_buffer": torch.ones_like(p)}  # momentum from before
        for optimizer in (sgd, torch.optim.AdamW(model.parameters(), 0.1)):
            model(**batch).loss.backward()
            optimizer.step()
        torch.optim.SGD(other.parameters(), 0.1).step()
        assert held.step == 2
    for n, p in prunable_weights(model).items():
        assert (p[~masks[n]] == 0).all() and not torch.equal(p[masks[n]], start[n][masks[n]])


@settings(deadline=None, max_examples=60, print_blob=True)
@given(st.lists(st.integers(40, 400), min_size=2, max_size=5), st.integers(2, 12), st.integers(0, 2**31), st.data())
def test_text_for_recovery_and_calibration_holds_every_domain_in_its_share(sizes, length, seed, data):
    "As the pruning experiment slices it: a beginning to recover on, and what follows to calibrate on."
    mixture = mix({str(i): torch.full((n,), i) for i, n in enumerate(sizes)}, length, seed)
    shares = mixture.domain.bincount() / len(mixture)
    enough = min(len(mixture) // 2, int(2 / shares.min()) + 1)  # blocks in which each domain must come
    first = data.draw(st.integers(enough, max(enough, len(mixture) - enough)))
    recovery, calibration = mixture[:first], mixture[first:first + enough]
    for part in (recovery, calibration):
        found = torch.stack([(part.rows == i).all(1).sum() for i in range(len(sizes))])  # of the tokens, not of labels
        assert ((found - shares * len(part)).abs() < 2).all()
    assert set(recovery.rows.flatten().tolist()) == set(range(len(sizes)))


def test_the_pruning_experiment_takes_its_text_from_a_mixture_of_all_domains():
    "Its own cell, run on four domains, each of one token: text to recover and to calibrate on holds all of them."
    path = Path(__file__).resolve().parents[1] / "nbs/experiments/dendritic_lm_pruning.ipynb"
    cells = ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    source, = [cell for cell in cells if "recovery, calibration =" in cell]

    def four_domains(corpus, length, train, **held_out):
        texts = {domain: torch.full((1000,), i) for i, domain in enumerate("abcd")}
        return {split: mix(texts, length) for split in ("train", *held_out)}

    place = dict(load_corpus=lambda domains: SimpleNamespace(records=[]), corpus_blocks=four_domains, domains="abcd",
                 recorder=SimpleNamespace(dataset=lambda record: None), length=16, train_tokens=4000, test_tokens=4000,
                 recovery_tokens=1000, batch_size=16, CALIBRATION=4)
    exec(source, place)  # noqa: S102  the experiment's own cell
    for name in ("train", "recovery", "calibration", "test"):
        assert set(place[name].rows.flatten().tolist()) == {0, 1, 2, 3}, name
    first = next(iter(place["calibration"].batches(16)))["input_ids"]
    assert set(first.flatten().tolist()) == {0, 1, 2, 3}
