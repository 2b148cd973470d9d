"""Pruning under hypothesis: exact shares whatever the scores, and shrunken models that say what masked ones say whatever is cut."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dendritic_lab.models.dendritic_lm import DendriticLMConfig, DendriticLMForCausalLM
from dendritic_lab.pruning.structured import list_units, mask_units, shrink, taylor_unit_scores, weakest_units
from dendritic_lab.pruning.unstructured import active_weights, apply_masks, hold_masks, magnitude_scores, make_masks, prunable_weights, wanda_scores

from transformers import BertConfig, BertForSequenceClassification, GPTNeoXConfig, GPTNeoXForCausalLM

SMALL = dict(vocab_size=30, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=6, max_position_embeddings=32, pad_token_id=0)
MODELS = {
    "dendritic": lambda: DendriticLMForCausalLM(DendriticLMConfig(vocab_size=30, hidden_size=24, num_hidden_layers=2, max_position_embeddings=32, branches=[[4, 3, 4], [2, 2]], soma_expansion=1, num_passes=2)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "bert": lambda: BertForSequenceClassification(BertConfig(**SMALL)),
}
IDS = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(0))


def make(name: str, seed: int = 0):
    torch.manual_seed(seed)
    model = MODELS[name]().double().eval()
    for p in model.parameters(): torch.nn.init.normal_(p, std=0.3)
    return model


@settings(deadline=None, max_examples=80, print_blob=True)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 7)), min_size=1, max_size=4), st.floats(0, 1), st.integers(1, 4), st.sampled_from(["global", "layer", "row"]), st.integers(0, 2**31))
def test_the_share_is_exact_and_no_kept_score_is_below_a_dropped_one(shapes, share, values, scope, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = {str(i): torch.randint(values, shape, generator=generator).float() for i, shape in enumerate(shapes)}  # few values: many ties
    masks = make_masks(scores, share, scope)
    pairs = [(scores[n], masks[n]) for n in scores]
    if scope == "global": pairs = [(torch.cat([s.flatten() for s, _ in pairs]), torch.cat([m.flatten() for _, m in pairs]))]
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
    assert small.dtype == torch.bfloat16 and small(IDS).logits.isfinite().all() and len(list_units(small)) <= len(list_units(model)) - len(units)
    apply_masks(model, make_masks(wanda_scores(model, [batch]), 0.5, "row"))
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_no_optimizer_moves_a_pruned_weight(name):
    model, other = make(name), make(name, seed=1)
    masks = make_masks(magnitude_scores(model), 0.6)
    batch = dict(input_ids=IDS, labels=IDS if name != "bert" else torch.tensor([0, 1]))
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with hold_masks(model, masks) as held:
        for optimizer in (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1), torch.optim.AdamW(model.parameters(), 0.1)):
            for p in model.parameters(): optimizer.state[p] = {"momentum_buffer": torch.ones_like(p)} if isinstance(optimizer, torch.optim.SGD) else {}  # momentum from before
            model(**batch).loss.backward()
            optimizer.step()
        torch.optim.SGD(other.parameters(), 0.1).step()
        assert held.step == 2
    for n, p in prunable_weights(model).items():
        assert (p[~masks[n]] == 0).all() and not torch.equal(p[masks[n]], start[n][masks[n]])
