"""Every model is one graph for `torch.export` and `torch.compile`, with fixed knobs; two of them go to ONNX."""

import shutil

import pytest
import torch
from torch import nn

from dendritic_lab.growth.plain import put_dendrites
from dendritic_lab.models.dendritic_lm import REPAIRED, DendriticLMConfig, DendriticLMForCausalLM
from dendritic_lab.models.dsn import DSNConfig, DSNForSequenceClassification
from dendritic_lab.models.liquid_vit import LiquidViT, LiquidViTConfig
from dendritic_lab.models.perforated_bert import PerforatedBertConfig, PerforatedBertForSequenceClassification


def text() -> dict:
    mask = (torch.arange(24) < torch.tensor([[24], [15]])).long()
    return {"input_ids": torch.randint(1, 99, (2, 24)) * mask, "attention_mask": mask}


def dsn(**parts): return DSNForSequenceClassification(DSNConfig(99, 32, 8, num_dendrites=2, **parts)), text()


def dsn_in_order():
    model, inputs = dsn(phrases=16, local_rank=4, leaky_dendrites=4, pooling="mean_max")
    pairs = torch.cat([torch.full((16, 1), -1), inputs["input_ids"][0, :17].unfold(0, 2, 1)], 1)
    model.set_phrases(pairs, torch.randn(16, 8))
    return model, inputs


def perforated(sparsity=0.0, keep_ratio=1.0):
    config = PerforatedBertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
        max_position_embeddings=32, block_size=4, gate_rank=4, sparsity=sparsity, keep_ratio=keep_ratio)
    return PerforatedBertForSequenceClassification(config), text()


def dendritic_lm(form="dendritic-lm", **changes):
    config = DendriticLMConfig.preset(
        form, vocab_size=99, hidden_size=24, num_hidden_layers=2, max_position_embeddings=32, branches=[[4, 2]] * 2,
        num_passes=2, use_cache=False, **changes)
    return DendriticLMForCausalLM(config), text()


def liquid_vit():
    config = LiquidViTConfig(image_size=16, width=32, depth=3, heads=4, gate_layers=(1, 2), gate_dim=8, state_dim=8)
    return LiquidViT(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def grown():
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    return put_dendrites(plain, {"0": 2, "2": 1}), {"input": torch.randn(4, 8)}


MODELS = {"dsn": dsn, "dsn, in order": dsn_in_order, "perforated": perforated,
          "perforated, blocks dropped": lambda: perforated(sparsity=0.5),
          "perforated, tokens dropped": lambda: perforated(keep_ratio=0.5), "dendritic lm": dendritic_lm,
          "dendritic lm, as documented": lambda: dendritic_lm("dendritic-294m"),
          "dendritic lm, all parts": lambda: dendritic_lm("dendritic-294m", **REPAIRED),
          "liquid vit": liquid_vit, "grown": grown}


def made(name: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    return model.eval(), inputs


def scores(output): return output if isinstance(output, torch.Tensor) else output.logits


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_torch_export(name):
    model, inputs = made(name)
    program = torch.export.export(model, (), inputs)
    torch.testing.assert_close(scores(program.module()(**inputs)), scores(model(**inputs)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_one_graph_for_torch_compile(name):
    model, inputs = made(name)  # what is traced is one graph for any backend; generating code takes minutes
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(scores(compiled(**inputs)), scores(model(**inputs)), rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def code_cache(tmp_path_factory):
    "A folder for generated code, empty at first."
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.mark.skipif(shutil.which("g++") is None, reason="code for the CPU needs a C++ compiler")
@pytest.mark.parametrize("name", ["dsn", "perforated", "dendritic lm", "liquid vit", "grown"])  # tens of seconds each
@torch.no_grad()
def test_code_that_torch_compile_generates(name, code_cache):
    model, inputs = made(name)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(scores(compiled(**inputs)), scores(model(**inputs)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["dsn", "grown"])
@torch.no_grad()
def test_onnx(name, tmp_path):
    for module in ("onnxscript", "onnxruntime"): pytest.importorskip(module, reason="needs the extra onnx")
    import onnxruntime
    model, inputs = made(name)
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (), file, kwargs=inputs, dynamo=True)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    got, *_ = session.run(None, {i.name: inputs[i.name].numpy() for i in session.get_inputs()})
    torch.testing.assert_close(torch.from_numpy(got), scores(model(**inputs)), rtol=1e-5, atol=1e-5)
