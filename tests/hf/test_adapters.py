"""Adapters of PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.hf.tiny import GREEDY, awake, close, ids_of, tiny

from lineartime.hf import LineartimeForCausalLM, LineartimeForQuestionAnswering

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT asks for it


def test_an_adapter_of_peft_learns_on_the_projections(causal: LineartimeForCausalLM) -> None:
    ids, targets = ids_of(2, 14), ["to_gate_value_base", "to_output"]
    before = causal(ids).logits
    maps = [name for name, _ in causal.named_modules() if name.rpartition(".")[2] in targets]
    adapted = peft.get_peft_model(causal, peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    learned = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert len(learned) == 2 * len(maps) == 8
    torch.testing.assert_close(adapted(ids).logits, before)
    optimizer, losses = torch.optim.SGD(learned, lr=1.0), []
    for _ in range(3):
        loss = adapted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    adapted.eval()
    after, continued = adapted(ids).logits, adapted.generate(input_ids=ids, **GREEDY)
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(ids).logits, after, atol=1e-5, rtol=1e-4)
    assert merged.generate(ids, **GREEDY).tolist() == continued.tolist()


@pytest.mark.filterwarnings("ignore:Model has .tie_word:UserWarning")
@pytest.mark.parametrize("settings", [{"trainable_token_indices": [3]}, {"target_modules": ["embedding", "to_output"]}])
def test_adapter_on_the_embedding_begins_with_the_same_text(settings: dict[str, Any], causal: LineartimeForCausalLM) -> None:
    ids = ids_of(1, 5)
    before, text = causal(ids).logits, causal.generate(ids, **GREEDY)
    options = {"r": 2, "task_type": "CAUSAL_LM", "target_modules": ["to_output"], **settings}
    adapted = peft.get_peft_model(causal, peft.LoraConfig(**options)).eval()
    torch.testing.assert_close(adapted(ids).logits, before)
    assert adapted.generate(input_ids=ids, **GREEDY).tolist() == text.tolist()


def test_a_learned_prompt_is_read_once(causal: LineartimeForCausalLM) -> None:
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_attention_heads=1)
    tuned, ids = peft.get_peft_model(causal, settings).eval(), ids_of(1, 5)
    found = tuned.generate(input_ids=ids, **GREEDY, return_dict_in_generate=True, output_logits=True)
    expected = tuned(input_ids=found.sequences[:, :-1]).logits[0, -4:]
    close(torch.cat(found.logits), expected)


def test_an_adapter_for_questions_trains_and_saves_the_head(tmp_path: Path) -> None:
    model = awake(LineartimeForQuestionAnswering(tiny(task="mlm")))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["to_output"], task_type="QUESTION_ANS"))
    assert sum("qa_outputs" in name and weight.requires_grad for name, weight in adapted.named_parameters()) == 2
    adapted.save_pretrained(tmp_path)
    assert any("qa_outputs" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
