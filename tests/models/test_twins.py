from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from mless.models.twins import twin
from spelling import model_folder


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_folder(tmp_path / "tiny")).eval()


def test_a_twin_has_the_same_weights_and_modules_of_its_own(model: nn.Module) -> None:
    other = twin(model)
    assert other is not None
    assert [one.data_ptr() for one in other.parameters()] == [one.data_ptr() for one in model.parameters()]
    assert not {id(one) for one in other.modules()} & {id(one) for one in model.modules()}
    configs = [{id(one.config) for one in both.modules() if hasattr(one, "config")} for both in (model, other)]
    assert not configs[0] & configs[1]


def test_what_is_attached_to_one_is_not_there_in_the_other(model: nn.Module) -> None:
    other = twin(model)
    assert other is not None
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = other(input_ids=ids).logits
        hook = model.get_input_embeddings().register_forward_hook(lambda module, given, output: output * 0)
        assert (other(input_ids=ids).logits == before).all()
        assert not (model(input_ids=ids).logits == before).all()
        hook.remove()
        assert (model(input_ids=ids).logits == before).all()


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_a_model_with_a_function_that_knows_it_has_no_twin(model: nn.Module, how: str) -> None:
    """A copy of that function would still use the first model."""
    head = model.get_output_embeddings()
    own = head.forward
    if how == "hook":
        head.register_forward_hook(lambda module, given, output: head.weight.sum() + output)
    else:
        head.forward = lambda given: own(given)
    assert twin(model) is None


def test_a_model_that_cannot_be_copied_has_no_twin(model: nn.Module) -> None:
    class Alone(nn.Module):
        def __deepcopy__(self, memo: object) -> nn.Module:
            raise RuntimeError("only one of it")

    model.add_module("alone", Alone())
    assert twin(model) is None
