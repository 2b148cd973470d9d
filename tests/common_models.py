"""transformers' common model tests on the three models that it loads; `test_common_models.py` runs this file.

`DENDRITIC_LAB_COMMON_TESTS` names test_modeling_common.py of the installed version's source distribution.
"""

import importlib.util
import os
import sys
import types
import unittest

import torch

from dendritic_lab.models.dendritic_lm import DendriticLMConfig, DendriticLMForCausalLM, DendriticLMModel
from dendritic_lab.models.dsn import DSNConfig, DSNForSequenceClassification
from dendritic_lab.models.perforated_bert import (
    PerforatedBertConfig, PerforatedBertForMaskedLM, PerforatedBertForSequenceClassification, PerforatedBertModel)


def common_tests() -> types.ModuleType:
    "The module of the common tests. The two mixins of folders that the distribution leaves out are empty."
    package = "transformers_common_tests"
    for name in ("", ".exporters", ".generation"):
        sys.modules[package + name] = types.ModuleType(package + name)
        sys.modules[package + name].__path__ = []
    mixins = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
    for name, mixin in mixins.items():
        module = sys.modules[f"{package}.{name}"] = types.ModuleType(f"{package}.{name}")
        setattr(module, mixin, type(mixin, (), {}))
    file = os.environ["DENDRITIC_LAB_COMMON_TESTS"]
    spec = importlib.util.spec_from_file_location(f"{package}.test_modeling_common", file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


common = common_tests()
common.MODEL_MAPPING_NAMES |= {"perforated_bert": "PerforatedBertModel", "dendritic_lm": "DendriticLMModel"}
common.MODEL_FOR_MASKED_LM_MAPPING_NAMES["perforated_bert"] = "PerforatedBertForMaskedLM"
common.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["dendritic_lm"] = "DendriticLMForCausalLM"


class Tester:
    "What the common tests ask of a model: a small configuration and inputs for it."
    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads, vocab_size = 3, 7, 32, 2, 4, 99
    is_training = True

    def __init__(self, parent: unittest.TestCase): self.parent = parent

    def prepare_config_and_inputs_for_common(self):
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 1) + 1  # 0 is padding
        mask = common.random_attention_mask([self.batch_size, self.seq_length])
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Common(common.ModelTesterMixin):
    "Labels for classifiers, which the common tests give only to transformers' own."
    has_attentions = False

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
        if return_labels and "ForSequenceClassification" in model_class.__name__:
            inputs["labels"] = torch.zeros(self.model_tester.batch_size, dtype=torch.long)
        return inputs


class DSNTester(Tester):
    expected_num_hidden_layers = 3

    def get_config(self):
        return DSNConfig(self.vocab_size, self.hidden_size, phrases=16, local_rank=4, leaky_dendrites=4)


class PerforatedBertTester(Tester):
    def get_config(self):
        return PerforatedBertConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads, intermediate_size=37, max_position_embeddings=32,
            block_size=4, gate_rank=4)


class DendriticLMTester(Tester):
    preset = "dendritic-lm"

    def get_config(self):
        return DendriticLMConfig.preset(
            self.preset, num_passes=1, vocab_size=self.vocab_size, hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers, branches=[[4, 2]] * self.num_hidden_layers,
            max_position_embeddings=32, pad_token_id=0)


class DSNTest(Common, unittest.TestCase):
    all_model_classes = (DSNForSequenceClassification,)

    def setUp(self): self.model_tester = DSNTester(self)


class PerforatedBertTest(Common, unittest.TestCase):
    all_model_classes = (PerforatedBertModel, PerforatedBertForSequenceClassification, PerforatedBertForMaskedLM)
    test_all_params_have_gradient = False  # scorers have none where nothing is dropped

    def setUp(self): self.model_tester = PerforatedBertTester(self)


class DendriticLMTest(Common, common.GenerationTesterMixin, unittest.TestCase):
    all_model_classes = (DendriticLMModel, DendriticLMForCausalLM)

    def setUp(self): self.model_tester = DendriticLMTester(self)


class DocumentedLMTester(DendriticLMTester):
    preset = "dendritic-294m"


class DocumentedLMTest(DendriticLMTest):
    def setUp(self): self.model_tester = DocumentedLMTester(self)
